// Operators that the fake device has itself, as they are views, copies or wait for the device; and draws.
#pragma once
#include <ATen/NativeFunctions.h>

#include "within.h"

namespace {

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.device() != src.device() && !non_blocking) note_sync("memcpy");
  Within w;
  host(self).copy_(host(src));
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor d = dst;
  copy_(d, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor view_dtype(const Tensor& self, at::ScalarType dtype) { return at::native::view_dtype(self, dtype); }
Tensor unfold(const Tensor& self, int64_t d, int64_t size, int64_t step) { return at::native::unfold(self, d, size, step); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes_ = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t numel = c10::multiply_integers(sizes_);
  size_t needed = (numel + self.storage_offset()) * self.itemsize();
  if (numel && needed > self.storage().nbytes()) {
    auto data = allocator.allocate(needed);
    auto old = self.storage();
    if (old.nbytes()) memcpy(host_view + ((char*)data.get() - device_view), host_view + ((char*)old.data() - device_view), old.nbytes());
    old.set_data_ptr_noswap(std::move(data));
    old.unsafeGetStorageImpl()->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(sizes_);
  return self;
}
Tensor& set_offset(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  auto sizes_ = C10_AS_INTARRAYREF_SLOW(size);
  auto strides_ = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides_.empty() && !sizes_.empty()) impl->set_sizes_contiguous(sizes_);
  else impl->set_sizes_and_strides(sizes_, strides_);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t n = storage.nbytes() / self.itemsize();
  return set_offset(self, storage, 0, c10::SymIntArrayRef({c10::SymInt(n)}), {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_offset(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}
Tensor& set_nothing(Tensor& self) {
  at::Storage s(at::Storage::use_byte_size_t(), 0, &allocator, true);
  return set_offset(self, s, 0, c10::SymIntArrayRef({c10::SymInt(0)}), {});
}
at::Scalar local_scalar(const Tensor& self) {
  note_sync("item");
  Within w;
  return host(self).item();
}
Tensor nonzero(const Tensor& self) {
  note_sync("nonzero");
  Within w;
  return device_like(host(self).nonzero());
}
void record_stream(Tensor&, Stream) {}

Tensor& bernoulli_float(Tensor& self, double p, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).bernoulli_(p, host_generator(s)); return self;
}
Tensor& bernoulli_tensor(Tensor& self, const Tensor& p, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).bernoulli_(host(p), host_generator(s)); return self;
}
Tensor bernoulli(const Tensor& p, std::optional<at::Generator> g) {
  auto s = draw_state(g, p.numel()); Within w;
  return device_like(host(p).bernoulli(host_generator(s)));
}
Tensor& uniform_(Tensor& self, double a, double b, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).uniform_(a, b, host_generator(s)); return self;
}
Tensor& normal_(Tensor& self, double a, double b, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).normal_(a, b, host_generator(s)); return self;
}
Tensor& exponential_(Tensor& self, double a, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).exponential_(a, host_generator(s)); return self;
}
Tensor& random_(Tensor& self, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).random_(host_generator(s)); return self;
}
Tensor& random_to(Tensor& self, int64_t to, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).random_(to, host_generator(s)); return self;
}
Tensor& random_from(Tensor& self, int64_t from, std::optional<int64_t> to, std::optional<at::Generator> g) {
  auto s = draw_state(g, self.numel()); Within w;
  host(self).random_(from, to, host_generator(s)); return self;
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    Within w;
    Tensor h = host(x);
    return {device_like(h.clone()), device_like(at::ones_like(h, h.options().dtype(at::kBool)))};
  }
  auto s = draw_state(std::nullopt, x.numel()); Within w;
  Tensor h = host(x);
  Tensor mask = at::empty_like(h, h.options().dtype(at::kBool)).bernoulli_(1 - p, host_generator(s));
  return {device_like(h * mask / (1 - p)), device_like(mask)};
}
Tensor native_dropout_backward(const Tensor& g, const Tensor& mask, double scale) {
  Within w;
  return device_like(host(g) * host(mask) * scale);
}

}  // namespace
