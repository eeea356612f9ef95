// How the tasks of a call are shared out among threads.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace {

// Run body(work, task) for every task.  Each thread makes itself one Work(cursor, setup), whose buffers it keeps for
// all its tasks; tasks are taken from a counter, so that uneven ones or uneven cores keep threads busy.
// Returns 0, or 1 if there was no memory, or 2 if the threads could not be started.
template <class Work, class Setup, class Body>
int share(const Setup& setup, const Threads& threads, int64_t tasks, const Body& body) {
    Cursor count(nullptr);
    Work measure(count, setup);
    struct Shared {
        const Setup& setup;
        const Body& body;
        size_t floats;
        int64_t tasks, next, failed;
    } shared{setup, body, count.used(), tasks, 0, 0};
    auto loop = [](int64_t, int64_t, void* context) {
        Shared& s = *(Shared*)context;
        FlushDenormals flush;
        Block block(s.floats);
        if (!block.data()) {
            __atomic_store_n(&s.failed, 1, __ATOMIC_RELAXED);
            return;
        }
        Cursor cursor(block.data());
        Work work(cursor, s.setup);
        for (int64_t n; (n = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED)) < s.tasks;) s.body(work, n);
    };
    const int64_t workers = threads.count < tasks ? threads.count : tasks;
    if (threads.run && workers > 1) {
        if (threads.run(0, workers, 1, loop, &shared)) return 2;
    } else {
        loop(0, 1, &shared);
    }
    return (int)shared.failed;
}

}  // namespace
