// The generator of the fake device: a seed and an offset, as CUDA's. What is drawn follows from these two.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <c10/core/GeneratorImpl.h>

#include "memory.h"

namespace {

struct FakeGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = 0, offset_ = 0;
  FakeGenerator() : c10::GeneratorImpl(Device(c10::kCUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(1234567); return seed_; }
  void set_state(const c10::TensorImpl& s) override {
    memcpy(&seed_, s.data(), 8);
    memcpy(&offset_, (const char*)s.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, c10::ScalarType::Byte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    auto p = (char*)t.data_ptr();
    memcpy(p, &seed_, 8);
    memcpy(p + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  FakeGenerator* clone_impl() const override {
    auto g = new FakeGenerator();
    g->seed_ = seed_; g->offset_ = offset_;
    return g;
  }
};
at::Generator& default_generator() {
  static at::Generator g = at::make_generator<FakeGenerator>();
  return g;
}
std::pair<uint64_t, uint64_t> draw_state(const std::optional<at::Generator>& given, int64_t numel) {
  at::Generator g = given.has_value() && given->defined() ? *given : default_generator();
  TORCH_CHECK(g.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", g.device().type(), "'");
  std::lock_guard<std::mutex> lock(g.mutex());
  auto* f = (FakeGenerator*)g.unsafeGetGeneratorImpl();
  auto found = std::make_pair(f->seed_, f->offset_);
  f->offset_ += 4 * ((numel + 1023) / 1024);
  return found;
}
at::Generator host_generator(std::pair<uint64_t, uint64_t> state) {
  return at::detail::createCPUGenerator(state.first * 1000003 + state.second * 7919 + 17);
}

}  // namespace
