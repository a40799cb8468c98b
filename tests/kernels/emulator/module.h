// Included behind a .cu file: what lets the launching process call its kernels and find their shared variables.
#pragma once

#include <type_traits>
#include <utility>

#include "runtime.h"

namespace emulator {

template <class P> constexpr char kind() {
    static_assert(std::is_pointer_v<P> || std::is_same_v<P, long long> || std::is_same_v<P, double>,
                  "kernels take pointers, long long and double");
    return std::is_pointer_v<P> ? 'p' : std::is_same_v<P, double> ? 'd' : 'i';
}

template <class P> __attribute__((no_sanitize_thread)) P value(const Slot& slot) {
    if constexpr (std::is_pointer_v<P>) return reinterpret_cast<P>(slot.integer);
    else if constexpr (std::is_same_v<P, double>) return slot.real;
    else return slot.integer;
}

template <class... P, size_t... I>
__attribute__((no_sanitize_thread)) void call(void (*kernel)(P...), const Slot* slots, std::index_sequence<I...>) {
    kernel(value<P>(slots[I])...);
}

template <class... P> const char* signature(void (*)(P...)) {
    static const char kinds[] = {kind<P>()..., 0};
    return kinds;
}

template <class... P> constexpr std::index_sequence_for<P...> positions(void (*)(P...)) { return {}; }

}  // namespace emulator

static thread_local char emulator_marker;
extern "C" char* emulator_marker_address() { return &emulator_marker; }

#define EMULATOR_KERNEL(NAME, BOUND)                                                              \
    extern "C" unsigned bound_##NAME() { return BOUND; }                                          \
    extern "C" const char* signature_##NAME() { return emulator::signature(NAME); }               \
    extern "C" __attribute__((no_sanitize_thread)) void run_##NAME(const emulator::Slot* slots) { \
        emulator::call(NAME, slots, emulator::positions(NAME));                                   \
    }
