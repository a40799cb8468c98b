// Checks every load and store of the kernels: they are compiled with -fsanitize=thread,undefined, which calls the
// functions at the end of this file, and linked without the sanitizers' own runtimes.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "internal.h"

namespace emulator {
namespace {

enum class Access { read, write };

struct Cell {  // of one byte
    bool initialised;
    Moment written, read[2];
};

struct Region {
    std::string name;
    uintptr_t begin, end;
    std::vector<Cell> cells;  // of a shared variable: none until a block uses it
};

std::map<uintptr_t, Region> tensors;  // by their first byte
std::vector<Region> shared;
Region* last_used;

// Whether nothing orders `before` and `after`, which is of the running launch: launches follow one another.
bool concurrent(const Moment& before, const Moment& after) {
    if (before.launch != after.launch) return false;
    if (before.block != after.block) return true;
    return before.thread != after.thread && before.barriers == after.barriers;
}

// Two readers stand for all, of two blocks if there are such: whoever is concurrent with some reader is so with one.
void note_reader(Cell& cell, const Moment& reader) {
    if (!concurrent(cell.read[0], reader)) cell.read[0] = reader;
    else if (!concurrent(cell.read[1], reader) || cell.read[1].block == cell.read[0].block) cell.read[1] = reader;
}

const Moment* rival(const Cell& cell, Access access, const Moment& moment) {
    if (concurrent(cell.written, moment)) return &cell.written;
    if (access == Access::read) return nullptr;
    for (const Moment& read : cell.read)
        if (concurrent(read, moment)) return &read;
    return nullptr;
}

Region* covering(uintptr_t address) {
    if (last_used && address >= last_used->begin && address < last_used->end) return last_used;
    for (Region& region : shared)
        if (address >= region.begin && address < region.end) return last_used = &region;
    auto after = tensors.upper_bound(address);
    if (after == tensors.begin()) return nullptr;
    Region& region = std::prev(after)->second;
    return address < region.end ? last_used = &region : nullptr;
}

uintptr_t gap(const Region& region, uintptr_t address) {
    return address < region.begin ? region.begin - address : address >= region.end ? address - region.end : 0;
}

// The tensor or variable that an address was probably meant for.
const Region* nearest(uintptr_t address) {
    const Region* best = nullptr;
    uintptr_t best_gap = 4096;
    auto consider = [&](const Region& region) {
        if (gap(region, address) >= best_gap) return;
        best = &region;
        best_gap = gap(region, address);
    };
    for (const Region& region : shared) consider(region);
    for (const auto& entry : tensors) consider(entry.second);
    return best;
}

const char* verb(Access access) { return access == Access::read ? "reads" : "writes"; }

[[noreturn]] void fail_outside(const void* code, Access access, uintptr_t address, size_t bytes) {
    const Region* region = nearest(address);
    if (!region) fail(code, "out of bounds: %s %zu bytes far from any tensor", verb(access), bytes);
    long long offset = static_cast<long long>(address - region->begin);
    fail(code, "out of bounds: %s %zu bytes at byte %lld of %s, which has %zu", verb(access), bytes, offset,
         region->name.c_str(), size_t(region->end - region->begin));
}

void check_byte(const void* code, Access access, const Moment& moment, Region& region, size_t offset) {
    Cell& cell = region.cells[offset];
    const char* name = region.name.c_str();
    if (access == Access::read && !cell.initialised)
        fail(code, "uninitialised: reads byte %zu of %s, which nobody has written", offset, name);
    if (const Moment* other = rival(cell, access, moment))
        fail(code, "race: %s byte %zu of %s, which block %u, thread %u %s, with nothing to order them", verb(access),
             offset, name, other->block, other->thread, other == &cell.written ? "wrote" : "read");
    if (access == Access::read) return note_reader(cell, moment);
    cell.initialised = true;
    cell.written = moment;
}

void check(const void* code, Access access, const void* pointer, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (on_own_stack(address, address + bytes)) return;
    Region* region = covering(address);
    if (!region || address + bytes > region->end) fail_outside(code, access, address, bytes);
    if (region->cells.empty()) region->cells.resize(region->end - region->begin);
    Moment moment = now();
    for (size_t i = 0; i < bytes; ++i) check_byte(code, access, moment, *region, address - region->begin + i);
}

struct Location {
    const char* file;
    uint32_t line, column;
};

}  // namespace

void open_shared(const Launch& launch) {
    last_used = nullptr;
    shared.clear();
    for (size_t i = 0; i < launch.shared_count; ++i) {
        const SharedVariable& variable = launch.shared[i];
        auto begin = reinterpret_cast<uintptr_t>(launch.shared_base) + variable.offset;
        shared.push_back({std::string("shared ") + variable.name, begin, begin + variable.bytes, {}});
    }
}

void reset_shared() {
    for (Region& region : shared) region.cells.clear();
}

}  // namespace emulator

using emulator::Access;
using emulator::tensors;

extern "C" {

void emulator_add_tensor(uintptr_t begin, size_t bytes, const char* name, bool initialised) {
    emulator::Cell cell{};
    cell.initialised = initialised;
    tensors[begin] = {name, begin, begin + bytes, std::vector<emulator::Cell>(bytes, cell)};
}

void emulator_remove_tensor(uintptr_t begin) {
    emulator::last_used = nullptr;
    tensors.erase(begin);
}

// Marks bytes of a tensor as written by somebody who is no kernel.
void emulator_initialise(uintptr_t begin, size_t bytes) {
    emulator::Region* region = emulator::covering(begin);
    if (!region) return;
    for (size_t i = 0; i < std::min<size_t>(bytes, region->end - begin); ++i)
        region->cells[begin - region->begin + i].initialised = true;
}

size_t emulator_uninitialised(uintptr_t begin, size_t bytes) {
    emulator::Region* region = emulator::covering(begin);
    if (!region) return bytes;
    auto first = region->cells.begin() + (begin - region->begin);
    return std::count_if(first, first + bytes, [](const emulator::Cell& cell) { return !cell.initialised; });
}

#define CHECK(ACCESS, BYTES) emulator::check(__builtin_return_address(0), Access::ACCESS, address, BYTES)
#define HOOKS(BYTES)                                                                     \
    void __tsan_read##BYTES(void* address) { CHECK(read, BYTES); }                       \
    void __tsan_write##BYTES(void* address) { CHECK(write, BYTES); }                     \
    void __tsan_unaligned_read##BYTES(void* address) { CHECK(read, BYTES); }             \
    void __tsan_unaligned_write##BYTES(void* address) { CHECK(write, BYTES); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* address, size_t bytes) { CHECK(read, bytes); }
void __tsan_write_range(void* address, size_t bytes) { CHECK(write, bytes); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

void __ubsan_handle_type_mismatch_v1(emulator::Location* where, uintptr_t address) {
    emulator::fail(__builtin_return_address(0), "misaligned: address ...%03x is not aligned for the type accessed "
                   "(%s:%u)", unsigned(address & 0xfff), where->file, where->line);
}

#define UNDEFINED(NAME)                                                                                         \
    void __ubsan_handle_##NAME(emulator::Location* where) {                                                     \
        emulator::fail(__builtin_return_address(0), "undefined: %s (%s:%u)", #NAME, where->file, where->line);  \
    }
UNDEFINED(out_of_bounds)
UNDEFINED(add_overflow)
UNDEFINED(sub_overflow)
UNDEFINED(mul_overflow)
UNDEFINED(negate_overflow)
UNDEFINED(divrem_overflow)
UNDEFINED(shift_out_of_bounds)
UNDEFINED(float_cast_overflow)

}
