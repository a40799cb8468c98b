// The memory of the fake device, and pinned memory of the host.
//
// The device's memory is mapped twice. Tensors have addresses in a mapping that nobody may touch, so code that reads a
// tensor on the host by its address ends the process; kernels use the other. With FAKE_CUDA_OPEN set, both may be used.
// Sizes are rounded as CUDA's allocator does, and torch's profiler is told of them.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <vector>

namespace {

using c10::Device;

constexpr size_t ARENA = size_t(6) << 30;
char* device_view = nullptr;
char* host_view = nullptr;
std::mutex memory_mutex;
std::map<size_t, std::vector<size_t>> free_blocks;  // by size: offsets
std::map<void*, size_t> sizes;
size_t top = 0, allocated = 0, peak = 0;

void open_arena() {
  if (device_view) return;
  int fd = memfd_create("fake_cuda", 0);
  TORCH_CHECK(ftruncate(fd, ARENA) == 0);
  bool open = getenv("FAKE_CUDA_OPEN") != nullptr;
  device_view = (char*)mmap(nullptr, ARENA, open ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  host_view = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
}

void release(void* pointer) {
  if (!pointer) return;
  size_t size, now;
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    size = sizes.at(pointer);
    sizes.erase(pointer);
    free_blocks[size].push_back((char*)pointer - device_view);
    allocated -= size;
    now = allocated;
  }
  c10::reportMemoryUsageToProfiler(pointer, -(int64_t)size, now, now, Device(c10::kCUDA, 0));
}

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, Device(c10::kCUDA, 0)};
    size_t size = (n + 511) / 512 * 512, now;
    char* pointer;
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      open_arena();
      auto& found = free_blocks[size];
      size_t offset;
      if (!found.empty()) { offset = found.back(); found.pop_back(); }
      else {
        offset = top;
        TORCH_CHECK(top + size <= ARENA, "fake CUDA is out of memory");
        top += size;
      }
      pointer = device_view + offset;
      sizes[pointer] = size;
      allocated += size;
      peak = std::max(peak, allocated);
      now = allocated;
    }
    c10::reportMemoryUsageToProfiler(pointer, size, now, now, Device(c10::kCUDA, 0));
    return {pointer, pointer, &release, Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    memcpy(host_view + ((char*)dest - device_view), host_view + ((char*)src - device_view), count);
  }
};
FakeAllocator allocator;

std::mutex pinned_mutex;
std::map<char*, size_t> pinned;
void release_pinned(void* p) { std::lock_guard<std::mutex> lock(pinned_mutex); pinned.erase((char*)p); free(p); }
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    char* p = (char*)malloc(std::max<size_t>(n, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[p] = std::max<size_t>(n, 1);
    return {p, p, &release_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
PinnedAllocator pinned_allocator;
bool is_pinned_ptr(const void* p) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto it = pinned.upper_bound((char*)p);
  if (it == pinned.begin()) return false;
  --it;
  return (char*)p < it->first + it->second;
}

}  // namespace
