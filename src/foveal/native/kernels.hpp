// What the dispatcher and the kernels of each instruction set agree on.
#pragma once
#include <cstdint>

// torch's own thread pool, handed in from Python: torch_parallel_for and the number of threads.
struct Threads {
    int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
    int64_t count;
};

enum What : int64_t { FORWARD = 0, BACKWARD = 1, STEP = 2 };

// The name of a function, with the instruction set that it is compiled for.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
