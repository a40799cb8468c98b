// What the two halves of the runtime, scheduler.cpp and memory.cpp, know of each other.
#pragma once

#include "runtime.h"

namespace emulator {

// When and by whom something happened. `barriers` counts the __syncthreads passed.
struct Moment {
    uint32_t launch, block, thread, barriers;
};

Moment now();
bool on_own_stack(uintptr_t begin, uintptr_t end);

// Ends the launch with a message; called by a thread of the kernel.
[[noreturn]] void fail(const void* code, const char* format, ...) __attribute__((format(printf, 2, 3)));

void open_shared(const Launch& launch);
void reset_shared();

}  // namespace emulator
