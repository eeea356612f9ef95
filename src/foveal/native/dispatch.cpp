// The library's interface: a C function per operation, which calls the kernels of the best instruction set.
#include "kernels.hpp"

#define FOVEAL_EXPORT extern "C" __attribute__((visibility("default")))
#define KERNELS(isa)                                                                          \
    extern "C" int foveal_recurrence_##isa(const int64_t*, double, int64_t, const Threads*); \
    extern "C" int foveal_attention_##isa(const int64_t*, const double*, int64_t, const Threads*);
FOVEAL_ISAS(KERNELS)

namespace {

typedef int (*Recurrence)(const int64_t*, double, int64_t, const Threads*);
typedef int (*Attention)(const int64_t*, const double*, int64_t, const Threads*);

struct Set {
    const char* name;
    bool (*runs)();
    Recurrence recurrence;
    Attention attention;
};

#if defined(__x86_64__)
bool runs_v4() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool runs_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("f16c");
}
#endif
bool runs_base() { return true; }

#define ENTRY(isa) {#isa, runs_##isa, foveal_recurrence_##isa, foveal_attention_##isa},
const Set SETS[] = {FOVEAL_ISAS(ENTRY)};
const Set* chosen = nullptr;
Threads threads = {nullptr, 1};

const Set& best() {
    if (!chosen)
        for (const Set& set : SETS)
            if (!chosen && set.runs()) chosen = &set;
    return *chosen;
}

}  // namespace

FOVEAL_EXPORT void foveal_set_parallel(void* run) { threads.run = (decltype(threads.run))run; }

FOVEAL_EXPORT const char* foveal_isa() { return best().name; }

// For tests: take another set.  Returns 0, or 1 if there is none of that name or this processor cannot run it.
FOVEAL_EXPORT int foveal_use_isa(const char* name) {
    for (const Set& set : SETS)
        if (!__builtin_strcmp(set.name, name) && set.runs()) {
            chosen = &set;
            return 0;
        }
    return 1;
}

FOVEAL_EXPORT int foveal_recurrence(const int64_t* words, double scale, int64_t what, int64_t count) {
    const Threads own = {threads.run, count};
    return best().recurrence(words, scale, what, &own);
}

FOVEAL_EXPORT int foveal_attention(const int64_t* words, const double* reals, int64_t what, int64_t count) {
    const Threads own = {threads.run, count};
    return best().attention(words, reals, what, &own);
}
