// What a kernel of the fake device runs in: its tensors as tensors of the CPU, and a note of what waits for the device.
#pragma once
#include <torch/extension.h>

#include <atomic>
#include <string>

#include "device.h"

namespace {

using at::Tensor;

thread_local int within = 0;  // kernels of this file
std::atomic<int> sync_mode{0};  // 0 default, 1 warn, 2 error
std::atomic<long> syncs{0};
struct Within {
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  Within() { within++; }
  ~Within() { within--; }
};
void note_sync(const char* what) {
  if (within) return;
  syncs++;
  if (sync_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation: ", what);
}

Tensor host(const Tensor& t) {
  if (!t.defined() || t.device().is_cpu()) return t;
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kCPU));
  char* p = (char*)t.unsafeGetTensorImpl()->mutable_data();
  TORCH_CHECK(p >= device_view && p < device_view + ARENA, "not an address of the device");
  return at::from_blob(host_view + (p - device_view), t.sizes(), t.strides(), t.options().device(c10::kCPU).requires_grad(false));
}
Tensor device_like(const Tensor& h) {
  Tensor t = at::empty_strided(h.sizes(), h.strides(), h.options().device(c10::kCUDA));
  host(t).copy_(h);
  return t;
}

}  // namespace
