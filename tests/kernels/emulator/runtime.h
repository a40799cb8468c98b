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

// Each waits for the threads it names.
void block_barrier();
unsigned shuffle_xor(unsigned mask, unsigned value, int other);
unsigned ballot(unsigned mask, bool predicate);

// A __shared__ variable: where it lies in the thread-local block of its module.
struct SharedVariable {
    const char* name;
    size_t offset, bytes;
};

struct Launch {
    void (*kernel)(const long long*);
    const long long* arguments;
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
