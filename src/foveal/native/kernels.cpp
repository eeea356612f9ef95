// The kernels of one instruction set: compiled once per set with LANES and ISA given by the build.
#include "recurrence.hpp"

#include "share.hpp"

namespace {

void parse(const int64_t* words, double scale, int64_t what, Sizes& z, Arguments& x) {
    Words in{words};  // written by engines/recurrence/native.py
    z.B = in.number();
    z.H = in.number();
    z.T = in.number();
    z.K = in.number();
    z.V = in.number();
    z.decay = (Decay)in.number();
    z.erase = (Erase)in.number();
    z.normalize = in.number() != 0;
    z.scale = (float)scale;
    z.first = 0;
    z.all = z.V;
    z.columns = z.V + (z.normalize ? 1 : 0);
    z.Kp = round_up(z.K, LANES);
    z.Vp = round_up(z.columns, LANES);
    const long decay = z.decay == CHANNEL ? z.K : 1, widths[] = {z.K, z.K, z.V, decay, z.K, z.K};
    View* const letters[] = {&x.read, &x.write, &x.value, &x.decay, &x.erase_u, &x.erase_w};
    for (int i = 0; i < 6; i++) *letters[i] = in.view(z.H, z.T, widths[i]);
    x.state = in.pointer<float>();
    x.normalizer = in.pointer<float>();
    x.output = in.view(z.H, z.T, z.V);
    x.last_state = in.pointer<float>();
    x.last_normalizer = in.pointer<float>();
    x.entering = x.written = x.weight = nullptr;
    if (what == STEP) return;
    x.entering = in.pointer<float>();
    x.written = in.pointer<float>();
    x.weight = in.pointer<float>();
    if (what == FORWARD) return;
    x.grad_output = in.view(z.H, z.T, z.V);
    View* const grads[] = {&x.grad_read, &x.grad_write, &x.grad_value, &x.grad_decay, &x.grad_u, &x.grad_w};
    for (int i = 0; i < 6; i++) *grads[i] = in.view(z.H, z.T, widths[i]);
    x.grad_last_state = in.pointer<float>();
    x.grad_last_normalizer = in.pointer<float>();
    x.grad_state = in.pointer<float>();
    x.grad_normalizer = in.pointer<float>();
}

// What a call fills is mostly fresh memory.
void expect_outputs(const Sizes& z, const Arguments& x, int64_t what) {
    const size_t heads = z.B * z.H, rows = heads * z.T, state = heads * z.K * z.line() * 4;
    auto letter = [=](const View& v, long width) { expect_writes(v.data, rows * width * (v.kind == FP32 ? 4 : 2)); };
    if (what == BACKWARD) {
        const View* rows_k[] = {&x.grad_read, &x.grad_write, &x.grad_u, &x.grad_w};
        for (const View* v : rows_k) letter(*v, z.K);
        letter(x.grad_value, z.V);
        letter(x.grad_decay, z.decay == CHANNEL ? z.K : 1);
        return;
    }
    letter(x.output, z.V);
    expect_writes(x.last_state, heads * z.K * z.V * 4);
    expect_writes(x.entering, z.chunks() * state);
    expect_writes(x.written, rows * z.line() * 4);
}

// Columns of a task: all of a head, or where threads outnumber heads whole tiles, which do not depend on each other.
long task_width(const Sizes& z, int64_t threads) {
    constexpr long TILE = TILE_VECS * LANES;
    const long heads = z.B * z.H, parts = heads ? threads / heads : 0;
    return parts < 2 ? z.V : round_up((z.V + parts - 1) / parts, TILE);
}

template <class Work>
int over_heads(const Sizes& z, const Arguments& x, const Threads& threads, long width) {
    const long parts = width ? (z.V + width - 1) / width : 0;
    const Sizes widest = z.part(0, width);
    return share<Work>(widest, threads, z.B * z.H * parts, [&](Work& work, int64_t task) {
        work.head(x, z.part(task % parts * width, width), task / parts);
    });
}

}  // namespace

extern "C" int JOIN(foveal_recurrence_, ISA)(const int64_t* words, double scale, int64_t what, const Threads* threads) {
    Sizes z;
    Arguments x;
    parse(words, scale, what, z, x);
    expect_outputs(z, x, what);
    const Threads one = {nullptr, 1};
    const bool small = what == STEP && z.B * z.H * z.T * z.K * z.V < 1 << 17;  // waking a thread would cost more
    const Threads& own = small ? one : *threads;
    switch (what) {
        case FORWARD: return over_heads<Forward>(z, x, own, task_width(z, own.count));
        case BACKWARD: return over_heads<Backward>(z, x, own, z.V);  // gradients of r, p, u and w sum over columns
        default: return over_heads<Steps>(z, x, own, task_width(z, own.count));
    }
}
