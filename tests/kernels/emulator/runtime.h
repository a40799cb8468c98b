// What emulated kernels ask of the runtime, and what the runtime asks of the process that launches them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// The running thread, and the launch it belongs to.
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
unsigned lane_index();

// Each waits for the threads it names; `intrinsic` is what all of them must have called.
void block_barrier();
void warp_barrier(unsigned mask);
uint64_t shuffle(const char* intrinsic, unsigned mask, uint64_t value, unsigned source_lane);
unsigned ballot(const char* intrinsic, unsigned mask, bool predicate);

// Checks the bytes that an atomic operation is about to read and write.
void atomic_access(const void* address, size_t bytes);

union Slot {
    long long integer;
    double real;
};

// A __shared__ variable: where it lies in the thread-local block of its module.
struct SharedVariable {
    const char* name;
    size_t offset, bytes;
};

struct Launch {
    void (*kernel)(const Slot*);
    const Slot* arguments;
    unsigned grid, block;
    bool reversed;  // threads run from the last to the first
    char* shared_base;
    const SharedVariable* shared;
    size_t shared_count;
};

struct Outcome {
    bool failed;
    unsigned block, thread;
    const void* code;  // a return address in the kernel, or null
    char message[512];
};

}  // namespace emulator
