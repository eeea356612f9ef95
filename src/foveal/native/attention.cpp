// The attention kernels of one instruction set: how a call is read and shared out among threads.
#include "attention.hpp"

#include "share.hpp"

namespace {
namespace attention {

Table table(Words& in) {
    Table t;
    t.data = in.pointer<const int32_t>();
    t.batch = *in.at++;
    t.head = *in.at++;
    return t;
}

Field field(Words& in) {
    Field f;
    f.data = in.pointer<const void>();
    f.batch = *in.at++;
    f.head = *in.at++;
    f.row = *in.at++;
    f.column = *in.at++;
    return f;
}

void parse(const int64_t* words, const double* reals, int64_t what, Call& x) {
    Words in{words};  // written by engines/softmax/native.py
    x.B = in.number();
    x.H = in.number();
    x.G = in.number();
    x.T = in.number();
    x.S = in.number();
    x.K = in.number();
    x.V = in.number();
    x.N = in.number();
    x.size = in.number();
    x.together = in.number();
    x.shown_size = in.number();
    x.scale = (float)reals[0];
    x.cap = (float)reals[1];
    Table* tables[] = {&x.choice, &x.low, &x.high, &x.top, &x.place, &x.slot, &x.position};
    Field* fields[] = {&x.chosen, &x.shown, &x.bias, &x.mask};
    x.q = in.view(x.H, x.T, x.K);
    x.k = in.view(x.G, x.S, x.K);
    x.v = in.view(x.G, x.S, x.V);
    for (Table* t : tables) *t = table(in);
    for (Field* f : fields) *f = field(in);
    x.slopes = in.pointer<const float>();
    x.output = in.view(x.H, x.T, x.V);
    x.lse = in.pointer<float>();
    if (what == FORWARD) return;
    x.grad_output = in.view(x.H, x.T, x.V);
    x.grad_lse = in.pointer<const float>();
    x.grad_q = in.pointer<float>();
    x.grad_k = in.pointer<float>();
    x.grad_v = in.pointer<float>();
    x.grad_bias = in.pointer<float>();
}

// How tasks are cut never depends on the number of threads, so that results do not either.
constexpr long ENOUGH = 16;  // tasks, below which blocks are shared out, too
constexpr long LEAST = 4;    // blocks of a share

int forward(const Call& x, const Threads& all) {
    const long parts = x.parts(), tasks = x.B * x.lanes() * parts;
    if (!tasks) return 0;
    const long most = x.N / LEAST > 1 ? x.N / LEAST : 1, wanted = (ENOUGH + tasks - 1) / tasks;
    const long shares = wanted < most ? wanted : most;
    const Threads one = {nullptr, 1};
    const bool small = x.B * x.H * x.T * x.S * (x.K + x.V) < 1 << 16;  // waking a thread would cost more
    const Threads& threads = small ? one : all;
    const auto place = [&](int64_t task, long& b, long& lane, long& part) {
        part = task % parts;
        lane = task / parts % x.lanes();
        b = task / parts / x.lanes();
    };
    if (shares == 1)
        return share<Forward>(x, threads, tasks, [&](Forward& work, int64_t task) {
            long b, lane, part;
            place(tasks - 1 - task, b, lane, part);  // under causality the last parts are the longest
            Forward::blank(x, b, lane, part);
            work.run(x, b, lane, part, 0, x.N);
            work.finish(x);
        });
    const size_t floats = x.part() * (x.Vp() + LANES);
    Block partial(tasks * shares * floats);
    if (!partial.data()) return 1;
    const int failed = share<Forward>(x, threads, tasks * shares, [&](Forward& work, int64_t n) {
        const long task = n / shares, s = n % shares;
        long b, lane, part;
        place(task, b, lane, part);
        work.run(x, b, lane, part, x.N * s / shares, x.N * (s + 1) / shares);
        work.keep(x, partial.data() + n * floats);
    });
    if (failed) return failed;
    return share<Forward>(x, threads, tasks, [&](Forward& work, int64_t task) {
        long b, lane, part;
        place(task, b, lane, part);
        Forward::blank(x, b, lane, part);
        work.join(x, b, lane, part, partial.data() + task * shares * floats, shares);
    });
}

int backward(const Call& x, const Threads& threads) {
    const long heads = x.B * x.G, parts = x.parts();  // of keys
    if (!heads || !parts) return 0;
    const long beside = x.lanes() / x.G, wanted = (ENOUGH / 2 + heads * beside - 1) / (heads * beside);
    const long pieces = wanted < parts ? wanted : parts;  // of a lane
    const size_t keys = x.S * x.K, values = x.S * x.V, biases = x.grad_bias ? x.together * x.S : 0;
    const size_t floats = keys + values + biases;
    const long writers = beside * pieces;  // that meet in the gradients of one key head; the first adds to the result
    Block own(writers > 1 ? heads * (writers - 1) * floats : 0);
    if (!own.data()) return 1;
    int failed = share<Backward>(x, threads, heads * writers, [&](Backward& work, int64_t task) {
        const long head = task / writers, writer = task % writers, lane = head % x.G * beside + writer / pieces;
        float *k = x.grad_k + head * keys, *v = x.grad_v + head * values;
        float* bias = x.grad_bias ? x.grad_bias + (head / x.G * x.lanes() + lane) * biases : nullptr;
        if (writer) {
            k = own.data() + (head * (writers - 1) + writer - 1) * floats;
            v = k + keys;
            memset(k, 0, floats * 4);
            if (writer % pieces) bias = biases ? v + values : nullptr;  // the first piece of a lane is alone there
        }
        work.run(x, head / x.G, lane, writer % pieces, pieces, k, v, bias);
    });
    if (failed || writers == 1) return failed;
    struct Nothing {
        Nothing(Cursor&, const Call&) {}
    };
    return share<Nothing>(x, threads, heads, [&](Nothing&, int64_t head) {
        for (long writer = 1; writer < writers; writer++) {
            const float* from = own.data() + (head * (writers - 1) + writer - 1) * floats;
            const long lane = head % x.G * beside + writer / pieces;
            float* targets[] = {x.grad_k + head * keys, x.grad_v + head * values,
                                x.grad_bias + (head / x.G * x.lanes() + lane) * biases};
            const size_t sizes[] = {keys, values, writer % pieces ? biases : 0};
            for (int n = 0; n < 3; from += sizes[n], n++)
                for (size_t i = 0; i < sizes[n]; i++) targets[n][i] += from[i];
        }
    });
}

}  // namespace attention
}  // namespace

extern "C" int JOIN(foveal_attention_, ISA)(const int64_t* words, const double* reals, int64_t what,
                                            const Threads* threads) {
    attention::Call x;
    attention::parse(words, reals, what, x);
    return what == FORWARD ? attention::forward(x, *threads) : attention::backward(x, *threads);
}
