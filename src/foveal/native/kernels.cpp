// The kernels of one instruction set: compiled once per set with LANES and ISA given by the build.
#include "kernels.hpp"

#include "recurrence.hpp"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace {

// A call as a flat list of 64-bit words: see engines/recurrence/native.py, which writes it.
struct Reader {
    const int64_t* at;
    long number() { return (long)*at++; }
    template <class T>
    T* pointer() { return (T*)(intptr_t)*at++; }
    View view() {
        View v;
        v.data = pointer<void>();
        v.batch = *at++;
        v.head = *at++;
        v.token = *at++;
        v.channel = *at++;
        v.kind = *at++;
        return v;
    }
};

void parse(const int64_t* words, double scale, int64_t what, Sizes& z, Arguments& x) {
    Reader in{words};
    z.B = in.number();
    z.H = in.number();
    z.T = in.number();
    z.K = in.number();
    z.V = in.number();
    z.decay = (Decay)in.number();
    z.erase = (Erase)in.number();
    z.normalize = in.number() != 0;
    z.scale = (float)scale;
    z.columns = z.V + (z.normalize ? 1 : 0);
    z.Kp = round_up(z.K, LANES);
    z.Vp = round_up(z.columns, LANES);
    View* views[] = {&x.read, &x.write, &x.value, &x.decay, &x.erase_u, &x.erase_w};
    for (View* v : views) *v = in.view();
    x.state = in.pointer<float>();
    x.normalizer = in.pointer<float>();
    x.output = in.view();
    x.last_state = in.pointer<float>();
    x.last_normalizer = in.pointer<float>();
    x.entering = x.written = x.weight = nullptr;
    if (what == STEP) return;
    x.entering = in.pointer<float>();
    x.written = in.pointer<float>();
    x.weight = in.pointer<float>();
    if (what == FORWARD) return;
    View* more[] = {&x.grad_output, &x.grad_read, &x.grad_write, &x.grad_value, &x.grad_decay, &x.grad_u, &x.grad_w};
    for (View* v : more) *v = in.view();
    x.grad_last_state = in.pointer<float>();
    x.grad_last_normalizer = in.pointer<float>();
    x.grad_state = in.pointer<float>();
    x.grad_normalizer = in.pointer<float>();
}

// Heads are taken from a counter, so that uneven cores stay busy.  Returns 0, or 1 if memory ran out.
template <class Work>
int over_heads(const Sizes& z, const Arguments& x, const Threads& threads, bool small) {
    Cursor count(nullptr);
    Work measure(count, z);
    const size_t floats = count.used();
    struct Shared {
        const Sizes& z;
        const Arguments& x;
        size_t floats;
        int64_t next, failed;
    } shared{z, x, floats, 0, 0};
    auto body = [](int64_t, int64_t, void* context) {
        Shared& s = *(Shared*)context;
        FlushDenormals flush;
        Block block(s.floats);
        if (!block.data()) {
            __atomic_store_n(&s.failed, 1, __ATOMIC_RELAXED);
            return;
        }
        Cursor cursor(block.data());
        Work work(cursor, s.z);
        const int64_t heads = s.z.B * s.z.H;
        for (int64_t h; (h = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED)) < heads;) work.head(s.x, s.z, h);
    };
    const int64_t workers = threads.count < z.B * z.H ? threads.count : z.B * z.H;
    if (threads.run && workers > 1 && !small) {
        if (threads.run(0, workers, 1, body, &shared)) return 2;
    } else {
        body(0, 1, &shared);
    }
    return (int)shared.failed;
}

}  // namespace

extern "C" int JOIN(foveal_recurrence_, ISA)(const int64_t* words, double scale, int64_t what, const Threads* threads) {
    Sizes z;
    Arguments x;
    parse(words, scale, what, z, x);
    switch (what) {
        case FORWARD: return over_heads<Forward>(z, x, *threads, false);
        case BACKWARD: return over_heads<Backward>(z, x, *threads, false);
        default: return over_heads<Steps>(z, x, *threads, z.B * z.H * z.T * z.K * z.V < 1 << 17);
    }
}
