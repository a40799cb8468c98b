// Runs a grid block by block, the threads of a block as fibers that give way at barriers and warp intrinsics.

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "internal.h"

namespace emulator {
namespace {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;

enum class State { ready, in_warp, at_barrier, done };

struct Thread {
    State state;
    const char* intrinsic;
    unsigned mask, barriers;
    unsigned given;  // to the warp, at the intrinsic
};

// Fibers outlive launches: starting one costs a system call, switching between them does not.
struct Fiber {
    jmp_buf context;
    char* stack;
    bool started;
};

std::vector<Fiber> fibers;
std::vector<Thread> threads;
std::vector<unsigned> exchanged;  // what each thread gave when its warp last met
Launch launch;
Outcome* outcome;
uint32_t launches, block;
unsigned current;
jmp_buf scheduler;

void give_way() {
    if (!_setjmp(fibers[current].context)) _longjmp(scheduler, 1);
}

void run_fiber() {
    for (;;) {
        launch.kernel(launch.arguments);
        threads[current].state = State::done;
        give_way();
    }
}

void start(Fiber& fiber) {
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

void resume(unsigned thread) {
    current = thread;
    if (_setjmp(scheduler)) return;
    if (fibers[thread].started) _longjmp(fibers[thread].context, 1);
    start(fibers[thread]);
}

void report(unsigned thread, const void* code, const char* format, va_list values) {
    outcome->failed = true;
    outcome->block = block;
    outcome->thread = thread;
    outcome->code = code;
    vsnprintf(outcome->message, sizeof outcome->message, format, values);
    for (Fiber& fiber : fibers) fiber.started = false;
}

__attribute__((format(printf, 2, 3))) void report(unsigned thread, const char* format, ...) {
    va_list values;
    va_start(values, format);
    report(thread, nullptr, format, values);
    va_end(values);
}

const char* whereabouts(const Thread& thread) {
    switch (thread.state) {
        case State::in_warp: return thread.intrinsic;
        case State::at_barrier: return "__syncthreads";
        case State::done: return "its end";
        default: return "nothing";
    }
}

// Runs `visit` on each index below `count`, in the launch's order, until it returns false.
template <class Visit> bool each(unsigned first, unsigned count, Visit visit) {
    for (unsigned i = 0; i < count; ++i)
        if (!visit(first + (launch.reversed ? count - 1 - i : i))) return false;
    return true;
}

// Whether all lanes named in the mask of `thread` wait where it does. If not, `missing` is one that does not.
bool met(unsigned first, const Thread& thread, unsigned& missing) {
    for (unsigned lane = 0; lane < WARP; ++lane) {
        const Thread& other = threads[first + lane];
        bool waits = other.state == State::in_warp && other.mask == thread.mask &&
                     !strcmp(other.intrinsic, thread.intrinsic);
        if ((thread.mask >> lane & 1) && !waits) return missing = first + lane, false;
    }
    return true;
}

void release(unsigned first, unsigned mask) {
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        exchanged[first + lane] = threads[first + lane].given;
        threads[first + lane].state = State::ready;
    }
}

// Runs a warp until each of its threads is at a barrier or done. Returns false on failure.
bool run_warp(unsigned first) {
    for (;;) {
        bool going = each(first, WARP, [](unsigned t) {
            if (threads[t].state == State::ready) resume(t);
            return !outcome->failed;
        });
        if (!going) return false;
        bool released = false;
        unsigned stuck = ~0u, missing = 0, absent = 0;
        for (unsigned t = first; t < first + WARP; ++t) {
            if (threads[t].state != State::in_warp) continue;
            if (met(first, threads[t], absent)) {
                release(first, threads[t].mask);
                released = true;
            } else {
                stuck = t;
                missing = absent;
            }
        }
        if (released) continue;
        if (stuck == ~0u) return true;
        report(stuck, "%s with mask 0x%08x waits for thread %u, which is at %s%s", threads[stuck].intrinsic,
               threads[stuck].mask, missing, whereabouts(threads[missing]),
               threads[missing].state == State::in_warp ? " (of another mask)" : "");
        return false;
    }
}

// Lets threads that all stand at a barrier pass. Returns whether there are any; a thread that is done is missing.
bool pass_barrier() {
    unsigned waiting = ~0u, done = ~0u;
    for (unsigned t = 0; t < launch.block; ++t) (threads[t].state == State::done ? done : waiting) = t;
    if (waiting == ~0u) return false;
    if (done != ~0u) return report(waiting, "__syncthreads waits for thread %u, which is at its end", done), false;
    for (Thread& thread : threads) {
        thread.state = State::ready;
        ++thread.barriers;
    }
    return true;
}

void run_block() {
    threads.assign(launch.block, Thread{});
    reset_shared();
    do {
        bool going = each(0, launch.block / WARP, [](unsigned warp) { return run_warp(warp * WARP); });
        if (!going) return;
    } while (pass_barrier());
}

void provide_fibers(unsigned count) {
    if (count <= fibers.size()) return;
    size_t more = count - fibers.size();
    void* stacks = mmap(nullptr, more * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = 0; i < more; ++i) fibers.push_back({{}, static_cast<char*>(stacks) + i * STACK, false});
}

// Puts the current thread to sleep until the lanes in `mask` have called `intrinsic`.
void meet(const char* intrinsic, unsigned mask, unsigned value) {
    Thread& thread = threads[current];
    if (!(mask >> current % WARP & 1)) fail(nullptr, "%s with mask 0x%08x, which leaves the caller out", intrinsic, mask);
    thread.state = State::in_warp;
    thread.intrinsic = intrinsic;
    thread.mask = mask;
    thread.given = value;
    give_way();
}

}  // namespace

Index thread_index() { return {current, 0, 0}; }
Index block_index() { return {block, 0, 0}; }
Index block_size() { return {launch.block, 1, 1}; }

void block_barrier() {
    threads[current].state = State::at_barrier;
    give_way();
}

unsigned shuffle_xor(unsigned mask, unsigned value, int other) {
    meet("__shfl_xor_sync", mask, value);
    unsigned lane = current % WARP, source = lane ^ unsigned(other);
    if (source >= WARP || !(mask >> source & 1))
        fail(nullptr, "__shfl_xor_sync reads lane %u, which its mask 0x%08x leaves out", source, mask);
    return exchanged[current - lane + source];
}

unsigned ballot(unsigned mask, bool predicate) {
    meet("__ballot_sync", mask, predicate);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) bits |= exchanged[current - current % WARP + lane] << lane;
    return bits;
}

Moment now() { return {launches, block, current, threads[current].barriers}; }

bool on_own_stack(uintptr_t begin, uintptr_t end) {
    auto stack = reinterpret_cast<uintptr_t>(fibers[current].stack);
    return begin >= stack && end <= stack + STACK;
}

void fail(const void* code, const char* format, ...) {
    va_list values;
    va_start(values, format);
    report(current, code, format, values);
    va_end(values);
    _longjmp(scheduler, 1);
}

}  // namespace emulator

extern "C" void emulator_launch(const emulator::Launch* wanted, emulator::Outcome* result) {
    using namespace emulator;
    launch = *wanted;
    outcome = result;
    ++launches;
    provide_fibers(launch.block);
    exchanged.assign(launch.block, 0);
    open_shared(launch);
    for (unsigned i = 0; i < launch.grid && !outcome->failed; ++i) {
        block = launch.reversed ? launch.grid - 1 - i : i;
        run_block();
    }
}
