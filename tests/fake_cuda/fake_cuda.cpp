// A fake CUDA device for a torch that is built for the CPU: see plugin.py.
#include <ATen/native/CPUFallback.h>

#include <set>

#include "attention.h"
#include "operators.h"

namespace {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> waiting = {"aten::equal", "aten::masked_select", "aten::_unique2", "aten::is_nonzero"};
  if (!within && waiting.count(op.schema().name())) note_sync(op.schema().name().c_str());
  Within w;
  at::native::cpu_fallback(op, stack, true);
}
}  // namespace

REGISTER_ALLOCATOR(c10::kCUDA, &allocator);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("unfold", unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("nonzero", nonzero);
  m.impl("record_stream", record_stream);
  m.impl("bernoulli_.float", bernoulli_float);
  m.impl("bernoulli_.Tensor", bernoulli_tensor);
  m.impl("bernoulli", bernoulli);
  m.impl("uniform_", uniform_);
  m.impl("normal_", normal_);
  m.impl("exponential_", exponential_);
  m.impl("random_", random_);
  m.impl("random_.to", random_to);
  m.impl("random_.from", random_from);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  m.def("arena", [] { open_arena(); return std::make_pair((size_t)device_view, ARENA); });
  m.def("has_hooks", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("current_stream", [] { return current_stream; });
  m.def("set_stream", [](int64_t id) { current_stream = id; });
  m.def("new_stream", [] { return next_stream++; });
  m.def("allocated", [] { return allocated; });
  m.def("peak", [] { return peak; });
  m.def("reserved", [] { return top; });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("syncs", [] { return syncs.load(); });
  m.def("set_sync_mode", [](int mode) { sync_mode = mode; });
  m.def("note_sync", [](const std::string& what) { note_sync(what.c_str()); });
  m.def("default_generator", [] { return default_generator(); });
}
