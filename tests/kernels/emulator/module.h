// Included behind a .cu file: what lets the launching process call its kernels and find their shared variables.
#pragma once

#include <type_traits>
#include <utility>

#include "runtime.h"

namespace emulator {

template <class P> __attribute__((no_sanitize_thread)) P value(long long slot) {
    static_assert(std::is_pointer_v<P> || std::is_same_v<P, long long>, "kernels take pointers and long long");
    if constexpr (std::is_pointer_v<P>) return reinterpret_cast<P>(slot);
    else return slot;
}

template <class... P, size_t... I>
__attribute__((no_sanitize_thread)) void call(void (*kernel)(P...), const long long* slots, std::index_sequence<I...>) {
    kernel(value<P>(slots[I])...);
}

template <class... P> constexpr std::index_sequence_for<P...> positions(void (*)(P...)) { return {}; }

}  // namespace emulator

static thread_local char emulator_marker;
extern "C" char* emulator_marker_address() { return &emulator_marker; }

#define EMULATOR_KERNEL(NAME, BOUND)                                                             \
    extern "C" unsigned bound_##NAME() { return BOUND; }                                         \
    extern "C" unsigned arguments_##NAME() { return decltype(emulator::positions(NAME))::size(); } \
    extern "C" __attribute__((no_sanitize_thread)) void run_##NAME(const long long* slots) {     \
        emulator::call(NAME, slots, emulator::positions(NAME));                                  \
    }
