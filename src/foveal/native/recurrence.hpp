// The recurrence engine in chunks of up to 64 tokens; letters as in engines/recurrence/README.md.
//
//     S_t = D_t S_{t-1} - u_t (w_t' D_t S_{t-1}) + p_t v_t',    o_t = r_t' S_t
//
// One family serves every mechanism: which terms are there (kind of decay, kind of erasure, normaliser) is asked once
// per chunk; all work is in small matrix products.  Decays enter as products of numbers in [0, 1], so no exponent
// above 0 is ever formed.  Here w is negated as it is loaded, so that everything that follows is a sum:
//
//     erase what is written (u = p):  y = v + W S + L y          o = R S + A y            S = g S + P' y
//     erase along another u:          e = W S + Lp v + Lu e      o = R S + Ap v + Au e    S = g S + P' v + U' e
//
// A, L: products of rows decayed from one token to the other, at and below or strictly below the diagonal.
// R, W: rows decayed from the chunk's start; P, U: rows decayed to its end; g: the decay over the whole chunk.
#pragma once
#include "simd.hpp"

namespace {

constexpr long CHUNK = 64;  // tokens; a chunk's matrices then fit the first two caches at the usual head widths
constexpr long BLOCK = 16;  // tokens whose decays per channel are multiplied out pair by pair
constexpr long BLOCKS = CHUNK / BLOCK;

enum Decay : int64_t { NONE = 0, HEAD = 1, CHANNEL = 2 };
enum Erase : int64_t { KEEP = 0, WRITTEN = 1, OTHER = 2 };

struct Sizes {
    long B, H, T, K, V;
    long first, all;  // a task may take only some columns: the first of its V, and how many there are
    Decay decay;
    Erase erase;
    bool normalize;
    float scale;
    long Kp, Vp, columns;  // padded widths; columns of the state, the normaliser's included
    long chunks() const { return (T + CHUNK - 1) / CHUNK; }
    long line() const { return all + normalize; }  // floats in a row of what is saved for the backward pass
    // columns [from, from + V) of the state; each task has the normaliser for itself
    Sizes part(long from, long width) const {
        Sizes z = *this;
        z.first = from;
        z.V = width < all - from ? width : all - from;
        z.columns = z.V + (normalize ? 1 : 0);
        z.Vp = round_up(z.columns, LANES);
        return z;
    }
};

// What one call reads and writes.  States are contiguous fp32.
struct Arguments {
    View read, write, value, decay, erase_u, erase_w;
    const float *state, *normalizer;      // before the first token, or null
    View output;                          // [B, H, T, V]
    float *last_state, *last_normalizer;  // after the last token
    float* entering;                      // [B, H, chunks, K, columns] for the backward pass, or null
    float* written;                       // [B, H, T, columns]: y or e, for the backward pass, or null
    float* weight;                        // [B, H, T]: what the output was divided by, or null
    // backward only
    View grad_output;
    const float *grad_last_state, *grad_last_normalizer;  // or null
    View grad_read, grad_write, grad_value, grad_decay, grad_u, grad_w;
    float *grad_state, *grad_normalizer;  // or null
};

// ---- decays of one chunk ----------------------------------------------------------------------------------------

struct Decays {
    Decay kind;
    long width;                                // 1 or Kp
    float *step, *since, *until, *pair, *over, *total;
    // HEAD:    since[t], until[t]: from the chunk's start up to t, after t to its end; pair[t][s]: after s up to t
    // CHANNEL: since[t][k], until[t][k] within t's block; over[I][k]: over a whole block; step[t][k]: of one token
    // total: over the chunk, [1] or [Kp]

    Decays(Cursor& c, const Sizes& z) : kind(z.decay), width(z.decay == CHANNEL ? z.Kp : 1) {
        step = c.take(CHUNK * width);
        since = c.take(CHUNK * width);
        until = c.take(CHUNK * width);
        pair = c.take(kind == HEAD ? CHUNK * CHUNK : 0);
        over = c.take(BLOCKS * width);
        total = c.take(z.Kp);  // one gain per row of the state, also for one decay per head
    }

    // step holds the log decays on entry, 0 in rows that are not there
    void prepare(long rows, long Kp) {
        if (kind == HEAD) {
            float log_since = 0, log_until = 0;
            for (long t = 0; t < rows; t++) since[t] = log_since += step[t];
            for (long t = rows - 1; t >= 0; t--) {
                until[t] = log_until;
                log_until += step[t];
            }
            for (long t = 0; t < rows; t += LANES) {
                store(since + t, exp_vec(load(since + t)));
                store(until + t, exp_vec(load(until + t)));
                store(step + t, exp_vec(load(step + t)));
            }
            const Vec all = splat(exp_one(log_since));
            for (long k = 0; k < Kp; k += LANES) store(total + k, all);
            for (long t = 0; t < rows; t++) {
                float* now = pair + t * CHUNK;
                const float* before = now - CHUNK;
                const Vec d = splat(step[t]);
                for (long s = 0; s < t; s += LANES) store(now + s, load(before + s) * d);
                now[t] = 1;
                for (long s = t + 1; s < CHUNK; s++) now[s] = 0;
            }
        }
        if (kind != CHANNEL) return;
        for (long k = 0; k < Kp; k += LANES) {
            Vec log_total = {};
            for (long I = 0; I < rows / BLOCK; I++) {
                Vec log_over = {}, product = splat(1.0f);
                for (long t = I * BLOCK; t < (I + 1) * BLOCK; t++) {
                    const Vec a = load(step + t * Kp + k);
                    log_over += a;
                    const Vec d = exp_vec(a);
                    product = product * d;
                    store(step + t * Kp + k, d);
                    store(since + t * Kp + k, product);
                }
                product = splat(1.0f);
                for (long t = (I + 1) * BLOCK - 1; t >= I * BLOCK; t--) {
                    store(until + t * Kp + k, product);
                    product = product * load(step + t * Kp + k);
                }
                log_total += log_over;
                store(over + I * Kp + k, exp_vec(log_over));
            }
            store(total + k, exp_vec(log_total));
        }
    }
};

// out = x times a gain per row (HEAD: one number) or per element (CHANNEL)
INLINE void scale_rows(Decay kind, const float* x, const float* gain, long rows, long width, float* out) {
    for (long t = 0; t < rows; t++)
        for (long k = 0; k < width; k += LANES) {
            const long i = t * width + k;
            store(out + i, load(x + i) * (kind == CHANNEL ? load(gain + i) : splat(gain[t])));
        }
}

// rows [from, to) times one gain per channel
INLINE void scale_channels(float* x, const float* gain, long from, long to, long width) {
    for (long t = from; t < to; t++)
        for (long k = 0; k < width; k += LANES) store(x + t * width + k, load(x + t * width + k) * load(gain + k));
}

// ---- products of decayed rows -----------------------------------------------------------------------------------

// Rows that later tokens meet: p or u.
struct Writes {
    float *raw, *turned;  // [C, Kp]; transposed [Kp, C], decayed to the chunk's end once pairs() is done
    Writes(Cursor& c, const Sizes& z, bool there)
        : raw(c.take(there ? CHUNK * z.Kp : 0)), turned(c.take(there ? CHUNK * z.Kp : 0)) {}
};

// Rows that meet earlier writes: r or -w.
struct Reads {
    float *raw, *since;  // [C, Kp]; since: decayed from the chunk's start once from_start() is done
    Reads(Cursor& c, const Sizes& z, bool there)
        : raw(c.take(there ? CHUNK * z.Kp : 0)),
          since(z.decay == NONE ? raw : c.take(there ? CHUNK * z.Kp : 0)) {}
};

// Block-local decays of x before pairs(); afterwards from_start() completes them.
INLINE void begin(Reads& x, const Decays& d, long rows, long Kp) {
    if (d.kind != NONE) scale_rows(d.kind, x.raw, d.since, rows, Kp, x.since);
}
INLINE void from_start(Reads& x, const Decays& d, long rows, long Kp) {
    if (d.kind != CHANNEL) return;
    for (long k = 0; k < Kp; k += LANES) {
        Vec gain = splat(1.0f);
        for (long I = 0; I < rows / BLOCK; I++) {
            for (long t = I * BLOCK; t < (I + 1) * BLOCK; t++) {
                float* p = x.since + t * Kp + k;
                store(p, load(p) * gain);
            }
            gain = gain * load(d.over + I * Kp + k);
        }
    }
}

// a[t][s] = sum_k x_tk y_sk (decay after s up to t), for s <= t, or s < t if strict; 0 above.  For n readers at once.
INLINE void pairs(int n, Reads* const* x, float* const* a, const bool* strict, Writes& y, const Decays& d, long rows,
                  long Kp, float* scratch) {
    if (d.kind == CHANNEL) {
        scale_rows(CHANNEL, y.raw, d.until, rows, Kp, scratch);
        transpose(scratch, Kp, rows, Kp, y.turned, CHUNK);
        for (long I = 0; I < rows / BLOCK; I++) {
            const long start = I * BLOCK;
            for (int m = 0; m < n; m++) {
                float* own = a[m] + start * CHUNK;
                if (I)
                    product<Into::Set>(BLOCK, start, Kp, {x[m]->since + start * Kp, Kp, 1}, y.turned, CHUNK, own, CHUNK);
                for (long t = start; t < start + BLOCK; t++) {
                    float* e = scratch;  // x_t times the decay after s up to t
                    memcpy(e, x[m]->raw + t * Kp, Kp * 4);
                    float* row = a[m] + t * CHUNK;
                    for (long s = t; s >= start; s--) {
                        Vec meet = {};
                        const float *ys = y.raw + s * Kp, *ds = d.step + s * Kp;
                        for (long k = 0; k < Kp; k += LANES) {
                            const Vec ek = load(e + k);
                            meet += ek * load(ys + k);
                            store(e + k, ek * load(ds + k));
                        }
                        row[s] = sum(meet);
                    }
                    if (strict[m]) row[t] = 0;
                    for (long s = t + 1; s < CHUNK; s++) row[s] = 0;
                }
            }
            for (long k = 0; k < Kp; k++) {  // what was written before this block ages by it
                const Vec gain = splat(d.over[I * Kp + k]);
                float* line = y.turned + k * CHUNK;
                for (long s = 0; s < start; s += LANES) store(line + s, load(line + s) * gain);
            }
        }
        return;
    }
    transpose(y.raw, Kp, rows, Kp, y.turned, CHUNK);
    for (int m = 0; m < n; m++) {
        product<Into::Set, Part::LowerOut>(rows, rows, Kp, {x[m]->raw, Kp, 1}, y.turned, CHUNK, a[m], CHUNK);
        for (long t = 0; t < rows; t++) {
            float* row = a[m] + t * CHUNK;
            if (d.kind == HEAD)
                for (long s = 0; s <= t; s += LANES) store(row + s, load(row + s) * load(d.pair + t * CHUNK + s));
            for (long s = strict[m] ? t : t + 1; s < CHUNK; s++) row[s] = 0;
        }
    }
    if (d.kind == HEAD)
        for (long k = 0; k < Kp; k++)
            for (long s = 0; s < rows; s += LANES)
                store(y.turned + k * CHUNK + s, load(y.turned + k * CHUNK + s) * load(d.until + s));
}

// y = y + L y for a strictly lower L, in place: 8 rows at a time in registers
INLINE void solve(const float* lower, float* y, long rows, long width) {
    constexpr long N = 8;
    for (long i = 0; i < rows; i += N) {
        if (i) product<Into::Add>(N, width, i, {lower + i * CHUNK, CHUNK, 1}, y, width, y + i * width, width);
        for (long j = 0; j < width; j += LANES) {
            Vec own[N];
            UNROLL for (int t = 0; t < N; t++) {
                own[t] = load(y + (i + t) * width + j);
                UNROLL for (int s = 0; s < t; s++) own[t] += splat(lower[(i + t) * CHUNK + i + s]) * own[s];
                store(y + (i + t) * width + j, own[t]);
            }
        }
    }
}

// y = y + L' y, in place, from the last row up
INLINE void solve_transposed(const float* lower, float* y, long rows, long width) {
    constexpr long N = 8;
    for (long i = rows - N; i >= 0; i -= N) {
        const long after = i + N;
        if (after < rows)
            product<Into::Add>(N, width, rows - after, {lower + after * CHUNK + i, 1, CHUNK}, y + after * width, width,
                               y + i * width, width);
        for (long j = 0; j < width; j += LANES) {
            Vec own[N];
            UNROLL for (int t = N - 1; t >= 0; t--) {
                own[t] = load(y + (i + t) * width + j);
                UNROLL for (int s = N - 1; s > t; s--) own[t] += splat(lower[(i + s) * CHUNK + i + t]) * own[s];
                store(y + (i + t) * width + j, own[t]);
            }
        }
    }
}

// ---- a chunk in memory ------------------------------------------------------------------------------------------

struct Place {
    long b, h, first, real, rows;  // first token; tokens that exist; the same rounded up to whole blocks
};

INLINE Place place(const Sizes& z, long head, long chunk) {
    Place at;
    at.b = head / z.H;
    at.h = head % z.H;
    at.first = chunk * CHUNK;
    at.real = z.T - at.first < CHUNK ? z.T - at.first : CHUNK;
    at.rows = round_up(at.real, BLOCK);
    return at;
}

INLINE void fetch(const View& v, const Place& at, long n, float factor, float* out, long width) {
    for (long t = 0; t < at.real; t++) {
        read_row(v, v.row(at.b, at.h, at.first + t), n, factor, out + t * width);
        for (long i = n; i < width; i++) out[t * width + i] = 0;
    }
    memset(out + at.real * width, 0, (at.rows - at.real) * width * 4);
}

INLINE void put(const View& v, const Place& at, long n, const float* x, long width) {
    for (long t = 0; t < at.real; t++) write_row(v, v.row(at.b, at.h, at.first + t), n, x + t * width);
}

// the values, and 1 in the normaliser's column
INLINE void fetch_values(const Arguments& x, const Sizes& z, const Place& at, float* out) {
    fetch(x.value.from(z.first), at, z.V, 1.0f, out, z.Vp);
    if (z.normalize)
        for (long t = 0; t < at.real; t++) out[t * z.Vp + z.V] = 1;
}

// dense rows, the normaliser's column last, to padded ones and back
INLINE void widen(const float* dense, long rows, const Sizes& z, float* padded) {
    for (long k = 0; k < rows; k++) {
        memcpy(padded + k * z.Vp, dense + k * z.line(), z.columns * 4);
        for (long j = z.columns; j < z.Vp; j++) padded[k * z.Vp + j] = 0;
    }
}
INLINE void narrow(const float* padded, long rows, const Sizes& z, float* dense) {
    for (long k = 0; k < rows; k++) {
        memcpy(dense + k * z.line() + z.first, padded + k * z.Vp, z.V * 4);
        if (z.normalize && !z.first) dense[k * z.line() + z.all] = padded[k * z.Vp + z.V];
    }
}

// a state with its normaliser as last column; null is 0
INLINE void read_state(const float* matrix, const float* normalizer, long head, const Sizes& z, float* state) {
    memset(state, 0, z.Kp * z.Vp * 4);
    for (long k = 0; k < z.K; k++) {
        if (matrix) memcpy(state + k * z.Vp, matrix + (head * z.K + k) * z.all + z.first, z.V * 4);
        if (z.normalize && normalizer) state[k * z.Vp + z.V] = normalizer[head * z.K + k];
    }
}
INLINE void write_state(const float* state, long head, const Sizes& z, float* matrix, float* normalizer) {
    for (long k = 0; k < z.K; k++) {
        memcpy(matrix + (head * z.K + k) * z.all + z.first, state + k * z.Vp, z.V * 4);
        if (z.normalize && !z.first) normalizer[head * z.K + k] = state[k * z.Vp + z.V];
    }
}

// S = g S + P' y (+ U' e)
INLINE void advance(float* state, const Decays& d, const Writes& p, const float* y, const Writes* u, const float* e,
                    long rows, const Sizes& z) {
    const Left left = {p.turned, CHUNK, 1};
    if (d.kind == NONE)
        product<Into::Add>(z.Kp, z.Vp, rows, left, y, z.Vp, state, z.Vp);
    else
        product<Into::Scale>(z.Kp, z.Vp, rows, left, y, z.Vp, state, z.Vp, d.total);
    if (u) product<Into::Add>(z.Kp, z.Vp, rows, {u->turned, CHUNK, 1}, e, z.Vp, state, z.Vp);
}

// ---- forward ----------------------------------------------------------------------------------------------------

struct Forward {
    Decays decay;
    Reads r, w;
    Writes p, u;
    float *scratch, *a, *a_other, *l, *l_other, *v, *e, *o, *state;

    Forward(Cursor& c, const Sizes& z)
        : decay(c, z), r(c, z, true), w(c, z, z.erase != KEEP), p(c, z, true), u(c, z, z.erase == OTHER) {
        const bool other = z.erase == OTHER;
        scratch = c.take(CHUNK * z.Kp);
        a = c.take(CHUNK * CHUNK);
        l = c.take(z.erase == KEEP ? 0 : CHUNK * CHUNK);
        a_other = c.take(other ? CHUNK * CHUNK : 0);
        l_other = c.take(other ? CHUNK * CHUNK : 0);
        v = c.take(CHUNK * z.Vp);
        e = c.take(other ? CHUNK * z.Vp : 0);
        o = c.take(CHUNK * z.Vp);
        state = c.take(z.Kp * z.Vp);
    }

    // everything of a chunk that does not depend on the state
    void prepare(const Arguments& x, const Sizes& z, const Place& at) {
        const long n = at.rows, Kp = z.Kp;
        fetch(x.read, at, z.K, z.scale, r.raw, Kp);
        fetch(x.write, at, z.K, 1.0f, p.raw, Kp);
        if (z.decay != NONE) {
            fetch(x.decay, at, z.decay == HEAD ? 1 : z.K, 1.0f, decay.step, decay.width);
            decay.prepare(n, Kp);
        }
        if (z.erase != KEEP) fetch(x.erase_w, at, z.K, -1.0f, w.raw, Kp);
        if (z.erase == OTHER) fetch(x.erase_u, at, z.K, 1.0f, u.raw, Kp);
        const int readers = z.erase == KEEP ? 1 : 2;
        Reads* const reads[] = {&r, &w};
        const bool strict[] = {false, true};
        for (int m = 0; m < readers; m++) begin(*reads[m], decay, n, Kp);
        float* const to_p[] = {a, l};
        pairs(readers, reads, to_p, strict, p, decay, n, Kp, scratch);
        float* const to_u[] = {a_other, l_other};
        if (z.erase == OTHER) pairs(readers, reads, to_u, strict, u, decay, n, Kp, scratch);
        for (int m = 0; m < readers; m++) from_start(*reads[m], decay, n, Kp);
    }

    void head(const Arguments& x, const Sizes& z, long head) {
        read_state(x.state, x.normalizer, head, z, state);
        for (long c = 0; c < z.chunks(); c++) chunk(x, z, head, c);
        write_state(state, head, z, x.last_state, x.last_normalizer);
    }

    void chunk(const Arguments& x, const Sizes& z, long head, long c) {
        const Place at = place(z, head, c);
        const long n = at.rows, Kp = z.Kp, Vp = z.Vp;
        if (x.entering) narrow(state, z.K, z, x.entering + (head * z.chunks() + c) * z.K * z.line());
        prepare(x, z, at);
        fetch_values(x, z, at, v);
        float* erased = nullptr;
        if (z.erase == WRITTEN) {
            product<Into::Add>(n, Vp, Kp, {w.since, Kp, 1}, state, Vp, v, Vp);
            solve(l, v, n, Vp);
            erased = v;
        } else if (z.erase == OTHER) {
            product<Into::Set>(n, Vp, Kp, {w.since, Kp, 1}, state, Vp, e, Vp);
            product<Into::Add, Part::LowerLeft>(n, Vp, n, {l, CHUNK, 1}, v, Vp, e, Vp);
            solve(l_other, e, n, Vp);
            erased = e;
        }
        if (x.written && erased) narrow(erased, at.real, z, x.written + (head * z.T + at.first) * z.line());
        product<Into::Set>(n, Vp, Kp, {r.since, Kp, 1}, state, Vp, o, Vp);
        product<Into::Add, Part::LowerLeft>(n, Vp, n, {a, CHUNK, 1}, v, Vp, o, Vp);
        if (z.erase == OTHER) product<Into::Add, Part::LowerLeft>(n, Vp, n, {a_other, CHUNK, 1}, e, Vp, o, Vp);
        advance(state, decay, p, v, z.erase == OTHER ? &u : nullptr, e, n, z);
        if (z.normalize) divide(x, z, at, head);
        put(x.output.from(z.first), at, z.V, o, Vp);
    }

    // the output divided by its last column; 0 where nothing was written
    void divide(const Arguments& x, const Sizes& z, const Place& at, long head) {
        for (long t = 0; t < at.real; t++) {
            float* row = o + t * z.Vp;
            const float weight = row[z.V];
            if (x.weight && !z.first) x.weight[head * z.T + at.first + t] = weight;
            const Vec gain = splat(weight != 0 ? 1 / weight : 0.0f);
            for (long j = 0; j < z.Vp; j += LANES) store(row + j, load(row + j) * gain);
        }
    }
};

// ---- backward ---------------------------------------------------------------------------------------------------

struct Backward {
    Forward f;  // the chunk's letters again; its a, l, v, e, state are those of the forward pass
    float *grad_o, *grad_y, *grad_e, *turned, *state_turned, *grad_state, *grad_state_turned;
    float *da, *dl, *da_other, *dl_other;
    float *from_state, *grad_r, *grad_w, *grad_p, *grad_u, *sums, *scaled, *prefix, *near;

    Backward(Cursor& c, const Sizes& z) : f(c, z) {
        const bool erase = z.erase != KEEP, other = z.erase == OTHER;
        const long rows_k = CHUNK * z.Kp, rows_v = CHUNK * z.Vp, pairs = CHUNK * CHUNK;
        grad_o = c.take(rows_v);
        grad_y = c.take(rows_v);
        grad_e = c.take(other ? rows_v : 0);
        turned = c.take(rows_v);
        state_turned = c.take(z.Kp * z.Vp);
        grad_state = c.take(z.Kp * z.Vp);
        grad_state_turned = c.take(z.Kp * z.Vp);
        da = c.take(pairs);
        dl = c.take(erase ? pairs : 0);
        da_other = c.take(other ? pairs : 0);
        dl_other = c.take(other ? pairs : 0);
        from_state = c.take(rows_k);
        grad_r = c.take(rows_k);
        grad_w = c.take(erase ? rows_k : 0);
        grad_p = c.take(rows_k);
        grad_u = c.take(other ? rows_k : 0);
        sums = c.take(CHUNK * f.decay.width);
        prefix = c.take(CHUNK * f.decay.width);
        scaled = c.take(rows_k);
        near = c.take(z.decay == CHANNEL ? rows_k : 0);
    }

    void head(const Arguments& x, const Sizes& z, long head) {
        read_state(x.grad_last_state, x.grad_last_normalizer, head, z, grad_state);
        for (long c = z.chunks() - 1; c >= 0; c--) chunk(x, z, head, c);
        if (x.grad_state) write_state(grad_state, head, z, x.grad_state, x.grad_normalizer);
    }

    // gradient of the sums before the division by the normaliser
    void fetch_gradient(const Arguments& x, const Sizes& z, const Place& at, long head) {
        fetch(x.grad_output, at, z.V, 1.0f, grad_o, z.Vp);
        if (!z.normalize) return;
        for (long t = 0; t < at.real; t++) {
            float* g = grad_o + t * z.Vp;
            const float weight = x.weight[head * z.T + at.first + t], inverse = weight != 0 ? 1 / weight : 0.0f;
            read_row(x.output, x.output.row(at.b, at.h, at.first + t), z.V, 1.0f, f.o);
            float dot = 0;
            for (long j = 0; j < z.V; j++) {
                dot += g[j] * f.o[j];
                g[j] *= inverse;
            }
            g[z.V] = -dot * inverse;
        }
    }

    void chunk(const Arguments& x, const Sizes& z, long head, long c) {
        const Place at = place(z, head, c);
        const long n = at.rows, Kp = z.Kp, Vp = z.Vp;
        const bool erase = z.erase != KEEP, other = z.erase == OTHER;
        f.prepare(x, z, at);
        fetch_gradient(x, z, at, head);
        memset(f.state, 0, Kp * Vp * 4);
        widen(x.entering + (head * z.chunks() + c) * z.K * z.line(), z.K, z, f.state);
        float* written = erase ? x.written + (head * z.T + at.first) * z.line() : nullptr;
        if (z.erase == WRITTEN)
            refetch(written, z, at, f.v);
        else
            fetch_values(x, z, at, f.v);
        if (other) refetch(written, z, at, f.e);
        transpose(f.state, Vp, Kp, Vp, state_turned, Kp);
        transpose(grad_state, Vp, Kp, Vp, grad_state_turned, Kp);

        // gradients of what was written and erased
        product<Into::Set, Part::UpperLeft>(n, Vp, n, {f.a, 1, CHUNK}, grad_o, Vp, grad_y, Vp);
        product<Into::Add>(n, Vp, Kp, {f.p.turned, 1, CHUNK}, grad_state, Vp, grad_y, Vp);
        float* grad_system = grad_y;  // of the rows that the triangular system gave
        if (z.erase == WRITTEN) solve_transposed(f.l, grad_y, n, Vp);
        if (other) {
            product<Into::Set, Part::UpperLeft>(n, Vp, n, {f.a_other, 1, CHUNK}, grad_o, Vp, grad_e, Vp);
            product<Into::Add>(n, Vp, Kp, {f.u.turned, 1, CHUNK}, grad_state, Vp, grad_e, Vp);
            solve_transposed(f.l_other, grad_e, n, Vp);
            product<Into::Add, Part::UpperLeft>(n, Vp, n, {f.l, 1, CHUNK}, grad_e, Vp, grad_y, Vp);
            grad_system = grad_e;
        }
        put(x.grad_value, at, z.V, grad_y, Vp);

        // gradients of the products of rows
        transpose(f.v, Vp, n, Vp, turned, CHUNK);
        product<Into::Set, Part::LowerOut>(n, n, Vp, {grad_o, Vp, 1}, turned, CHUNK, da, CHUNK);
        if (erase) product<Into::Set, Part::LowerOut>(n, n, Vp, {grad_system, Vp, 1}, turned, CHUNK, dl, CHUNK);
        if (other) {
            transpose(f.e, Vp, n, Vp, turned, CHUNK);
            product<Into::Set, Part::LowerOut>(n, n, Vp, {grad_o, Vp, 1}, turned, CHUNK, da_other, CHUNK);
            product<Into::Set, Part::LowerOut>(n, n, Vp, {grad_e, Vp, 1}, turned, CHUNK, dl_other, CHUNK);
        }

        memset(sums, 0, n * f.decay.width * 4);
        memset(prefix, 0, n * f.decay.width * 4);
        read_side(f.r, grad_o, grad_r, z, n);
        if (erase) read_side(f.w, grad_system, grad_w, z, n);
        write_side(f.p, f.v, grad_p, z, n);
        if (other) write_side(f.u, f.e, grad_u, z, n);
        pair_side(f.p, grad_p, da, f.a, dl, f.l, z, n);
        if (other) pair_side(f.u, grad_u, da_other, f.a_other, dl_other, f.l_other, z, n);
        if (z.decay != NONE) put_decay(x, z, at);

        // gradient of the state that entered
        const Left r_turned = {f.r.since, 1, Kp};
        if (z.decay == NONE)
            product<Into::Add>(Kp, Vp, n, r_turned, grad_o, Vp, grad_state, Vp);
        else
            product<Into::Scale>(Kp, Vp, n, r_turned, grad_o, Vp, grad_state, Vp, f.decay.total);
        if (erase) product<Into::Add>(Kp, Vp, n, {f.w.since, 1, Kp}, grad_system, Vp, grad_state, Vp);

        put_scaled(x.grad_read, at, z, grad_r, z.scale);
        put(x.grad_write, at, z.K, grad_p, Kp);
        if (erase) put_scaled(x.grad_w, at, z, grad_w, -1.0f);
        if (other) put(x.grad_u, at, z.K, grad_u, Kp);
    }

    void refetch(const float* dense, const Sizes& z, const Place& at, float* out) {
        widen(dense, at.real, z, out);
        memset(out + at.real * z.Vp, 0, (at.rows - at.real) * z.Vp * 4);
    }

    void put_scaled(const View& v, const Place& at, const Sizes& z, float* x, float factor) {
        for (long i = 0; i < at.rows * z.Kp; i += LANES) store(x + i, load(x + i) * splat(factor));
        put(v, at, z.K, x, z.Kp);
    }

    // sums[t] += x_t . y_t, over channels for one decay per head
    void collect(float* to, const float* x, const float* y, float sign, long rows, const Sizes& z) {
        if (z.decay == NONE) return;
        for (long t = 0; t < rows; t++) {
            Vec total = {};
            for (long k = 0; k < z.Kp; k += LANES) {
                const Vec both = load(x + t * z.Kp + k) * load(y + t * z.Kp + k) * splat(sign);
                if (z.decay == CHANNEL)
                    store(to + t * z.Kp + k, load(to + t * z.Kp + k) + both);
                else
                    total += both;
            }
            if (z.decay == HEAD) to[t] += sum(total);
        }
    }

    // what r or w met in the state that entered: grad_x = since o (g S')
    void read_side(Reads& x, const float* grad, float* grad_x, const Sizes& z, long n) {
        product<Into::Set>(n, z.Kp, z.Vp, {grad, z.Vp, 1}, state_turned, z.Kp, from_state, z.Kp);
        collect(sums, x.since, from_state, 1.0f, n, z);
        decayed_from_start(from_state, grad_x, z, n);
    }

    // what p or u left in the state: grad_y = until o (v dS')
    void write_side(Writes& y, const float* v, float* grad_y_rows, const Sizes& z, long n) {
        product<Into::Set>(n, z.Kp, z.Vp, {v, z.Vp, 1}, grad_state_turned, z.Kp, from_state, z.Kp);
        decayed_to_end(from_state, grad_y_rows, z, n);
        collect(prefix, y.raw, grad_y_rows, 1.0f, n, z);
    }

    void decayed_from_start(const float* x, float* out, const Sizes& z, long n) {
        if (z.decay == NONE) memcpy(out, x, n * z.Kp * 4);
        if (z.decay == HEAD) scale_rows(HEAD, x, f.decay.since, n, z.Kp, out);
        if (z.decay != CHANNEL) return;
        for (long k = 0; k < z.Kp; k += LANES) {
            Vec gain = splat(1.0f);
            for (long I = 0; I < n / BLOCK; I++) {
                for (long t = I * BLOCK; t < (I + 1) * BLOCK; t++) {
                    const long i = t * z.Kp + k;
                    store(out + i, load(x + i) * load(f.decay.since + i) * gain);
                }
                gain = gain * load(f.decay.over + I * z.Kp + k);
            }
        }
    }

    void decayed_to_end(const float* x, float* out, const Sizes& z, long n) {
        if (z.decay == NONE) memcpy(out, x, n * z.Kp * 4);
        if (z.decay == HEAD) scale_rows(HEAD, x, f.decay.until, n, z.Kp, out);
        if (z.decay != CHANNEL) return;
        for (long k = 0; k < z.Kp; k += LANES) {
            Vec gain = splat(1.0f);
            for (long I = n / BLOCK - 1; I >= 0; I--) {
                for (long t = I * BLOCK; t < (I + 1) * BLOCK; t++) {
                    const long i = t * z.Kp + k;
                    store(out + i, load(x + i) * load(f.decay.until + i) * gain);
                }
                gain = gain * load(f.decay.over + I * z.Kp + k);
            }
        }
    }

    // gradients through A (with r) and L (with w) for one kind of writes
    void pair_side(Writes& y, float* grad_y_rows, float* ga, const float* a, float* gl, const float* l, const Sizes& z,
                   long n) {
        const int readers = z.erase == KEEP ? 1 : 2;
        float* const grads[] = {ga, gl};
        const float* const products[] = {a, l};
        Reads* const reads[] = {&f.r, &f.w};
        float* const grad_reads[] = {grad_r, grad_w};
        if (z.decay == CHANNEL) return channel_pairs(readers, y, grad_y_rows, grads, reads, grad_reads, z, n);
        for (int m = 0; m < readers; m++) {
            float* g = grads[m];
            for (long t = 0; t < n; t++) {
                float* row = g + t * CHUNK;
                for (long s = m ? t : t + 1; s < CHUNK; s++) row[s] = 0;  // L is strict
                if (z.decay != HEAD) continue;
                Vec met = {};  // how far this pair depends on each decay between its tokens
                for (long s = 0; s < t; s += LANES) {
                    Vec both = load(row + s) * load(products[m] + t * CHUNK + s);
                    for (long i = 0; s + LANES > t && i < LANES; i++)
                        if (s + i >= t) both[i] = 0;
                    met += both;
                    store(sums + s, load(sums + s) - both);
                }
                sums[t] += sum(met);
                for (long s = 0; s <= t; s += LANES) store(row + s, load(row + s) * load(f.decay.pair + t * CHUNK + s));
            }
            product<Into::Add, Part::LowerLeft>(n, z.Kp, n, {g, CHUNK, 1}, y.raw, z.Kp, grad_reads[m], z.Kp);
            product<Into::Add, Part::UpperLeft>(n, z.Kp, n, {g, 1, CHUNK}, reads[m]->raw, z.Kp, grad_y_rows, z.Kp);
        }
    }

    // The same with one decay per channel: blocks of tokens through an anchor between them, pairs in a block alone.
    // Pairs of a token with itself know no decay and enter last.
    void channel_pairs(int readers, Writes& y, float* grad_y_rows, float* const* grads, Reads* const* reads,
                       float* const* grad_reads, const Sizes& z, long n) {
        const long Kp = z.Kp, blocks = n / BLOCK;
        const Decays& d = f.decay;
        float *grad_x = from_state, *anchored = f.scratch;
        memset(near, 0, n * Kp * 4);
        for (int m = 0; m < readers; m++) {
            const float *g = grads[m], *x = reads[m]->raw;
            scale_rows(CHANNEL, y.raw, d.until, n, Kp, scaled);
            memset(grad_x, 0, n * Kp * 4);
            for (long I = 0; I < blocks; I++) {
                const long start = I * BLOCK;
                float* own = grad_x + start * Kp;
                if (I) {
                    product<Into::Set>(BLOCK, Kp, start, {g + start * CHUNK, CHUNK, 1}, scaled, Kp, own, Kp);
                    scale_rows(CHANNEL, own, d.since + start * Kp, BLOCK, Kp, own);
                }
                for (long t = start; t < start + BLOCK; t++) near_pairs(g, x, y.raw, grad_x, d.step, near, start, t, Kp);
                scale_channels(scaled, d.over + I * Kp, 0, start, Kp);
            }
            collect(sums, x, grad_x, 1.0f, n, z);
            add(grad_reads[m], grad_x, n * Kp);

            scale_rows(CHANNEL, x, d.since, n, Kp, scaled);
            memset(anchored, 0, n * Kp * 4);
            for (long I = blocks - 1; I > 0; I--) {
                const long start = I * BLOCK;
                product<Into::Add>(start, Kp, BLOCK, {g + start * CHUNK, 1, CHUNK}, scaled + start * Kp, Kp, anchored, Kp);
                scale_channels(anchored, d.over + (I - 1) * Kp, 0, start - BLOCK, Kp);
            }
            scale_rows(CHANNEL, anchored, d.until, n, Kp, anchored);
            add(near, anchored, n * Kp);
        }
        collect(sums, y.raw, near, -1.0f, n, z);
        add(grad_y_rows, near, n * Kp);
        for (long t = 0; t < n; t++) {  // only A has a diagonal
            const Vec own = splat(grads[0][t * CHUNK + t]);
            for (long k = t * Kp; k < (t + 1) * Kp; k += LANES) {
                store(grad_reads[0] + k, load(grad_reads[0] + k) + own * load(y.raw + k));
                store(grad_y_rows + k, load(grad_y_rows + k) + own * load(reads[0]->raw + k));
            }
        }
    }

    // pairs of token t with earlier ones of its block: the decay between them is a running product
    void near_pairs(const float* g, const float* x, const float* y, float* grad_x, const float* step, float* near,
                           long start, long t, long Kp) {
        for (long k = 0; k < Kp; k += LANES) {
            Vec between = splat(1.0f), total = load(grad_x + t * Kp + k);
            const Vec xt = load(x + t * Kp + k);
            for (long s = t - 1; s >= start; s--) {
                between = between * load(step + (s + 1) * Kp + k);
                const Vec weight = between * splat(g[t * CHUNK + s]);
                total += weight * load(y + s * Kp + k);
                store(near + s * Kp + k, load(near + s * Kp + k) + weight * xt);
            }
            store(grad_x + t * Kp + k, total);
        }
    }

    void add(float* to, const float* x, long n) {
        for (long i = 0; i < n; i += LANES) store(to + i, load(to + i) + load(x + i));
    }

    void put_decay(const Arguments& x, const Sizes& z, const Place& at) {
        const long n = at.rows, W = f.decay.width;
        // how far the state that entered reaches the one that leaves
        float* through = f.scratch;
        for (long k = 0; k < z.Kp; k++) {
            Vec met = {};
            for (long j = 0; j < z.Vp; j += LANES) met += load(f.state + k * z.Vp + j) * load(grad_state + k * z.Vp + j);
            through[k] = sum(met) * f.decay.total[k];
        }
        for (long k = 0; k < W; k++) {
            float before = through[k], after = 0;
            if (z.decay == HEAD)
                for (long i = 1; i < z.Kp; i++) before += through[i];
            for (long t = n - 1; t >= 0; t--) sums[t * W + k] = after += sums[t * W + k];
            for (long t = 0; t < n; t++) {
                sums[t * W + k] += before;
                before += prefix[t * W + k];
            }
        }
        put(x.grad_decay, at, z.decay == HEAD ? 1 : z.K, sums, W);
    }
};

// ---- one token after the other ------------------------------------------------------------------------------------

// For a handful of tokens: the formula itself, the state read and written once per token.
struct Steps {
    float *r, *p, *d, *u, *w, *v, *o, *weights;

    Steps(Cursor& c, const Sizes& z) {
        r = c.take(z.Kp);
        p = c.take(z.Kp);
        d = c.take(z.Kp);
        u = c.take(z.Kp);
        w = c.take(z.Kp);
        v = c.take(z.Vp);
        o = c.take(z.Vp);
        weights = c.take(z.Kp);
    }

    void head(const Arguments& x, const Sizes& z, long head) {
        float* state = x.last_state + head * z.K * z.all + z.first;
        const float* before = x.state ? x.state + head * z.K * z.all + z.first : nullptr;
        const float* weights_before = z.normalize && x.normalizer ? x.normalizer + head * z.K : nullptr;
        for (long t = 0; t < z.T; t++) {
            Place at = {head / z.H, head % z.H, t, 1, 1};
            token(x, z, at, head, before, weights_before, state);
            before = state;
            weights_before = weights;
        }
        if (z.normalize && !z.first) memcpy(x.last_normalizer + head * z.K, weights, z.K * 4);
    }

    void token(const Arguments& x, const Sizes& z, const Place& at, long head, const float* before,
               const float* weights_before, float* state) {
        const long K = z.K, V = z.V;
        fetch(x.read, at, K, z.scale, r, z.Kp);
        fetch(x.write, at, K, 1.0f, p, z.Kp);
        fetch(x.value.from(z.first), at, V, 1.0f, v, z.Vp);
        if (z.decay == NONE)
            for (long k = 0; k < z.Kp; k += LANES) store(d + k, splat(1.0f));
        else {
            fetch(x.decay, at, z.decay == HEAD ? 1 : K, 1.0f, d, z.Kp);
            const Vec all = splat(d[0]);
            for (long k = 0; k < z.Kp; k += LANES) store(d + k, exp_vec(z.decay == HEAD ? all : load(d + k)));
        }
        if (z.erase != KEEP) {
            fetch(x.erase_w, at, K, 1.0f, w, z.Kp);
            if (z.erase == OTHER) fetch(x.erase_u, at, K, 1.0f, u, z.Kp);
            for (long k = 0; k < K; k++) w[k] *= d[k];
        }
        const float* along = z.erase == OTHER ? u : p;
        const float* taken = z.erase != KEEP && before ? w : nullptr;
        long j = 0;
        for (; j + 4 * LANES <= V; j += 4 * LANES) columns<4>(z, j, before, state, taken);
        for (; j + LANES <= V; j += LANES) columns<1>(z, j, before, state, taken);
        for (; j < V; j++) column(z, j, before, state, taken, along);
        if (z.normalize) {
            float weight = 0, erased = 0;
            if (z.erase != KEEP && weights_before)
                for (long k = 0; k < K; k++) erased += w[k] * weights_before[k];
            for (long k = 0; k < K; k++) {
                const float old = weights_before ? weights_before[k] * d[k] : 0;
                weights[k] = old + p[k] - (z.erase == KEEP ? 0 : along[k] * erased);
                weight += weights[k] * r[k];
            }
            if (x.weight && !z.first) x.weight[head * z.T + at.first] = weight;
            const float inverse = weight != 0 ? 1 / weight : 0;
            for (long j = 0; j < V; j++) o[j] *= inverse;
        }
        put(x.output.from(z.first), at, V, o, z.Vp);
    }

    // some columns of the state, one pass over its rows, two with an erasure; w is decayed already
    template <int VECS>
    void columns(const Sizes& z, long j, const float* before, float* now, const float* erase) {
        Vec erased[VECS] = {}, value[VECS];
        const long K = z.K, all = z.all;
        UNROLL for (int i = 0; i < VECS; i++) value[i] = load(v + j + i * LANES);
        if (erase)
            for (long k = 0; k < K; k++) {
                const Vec gain = splat(erase[k]);
                UNROLL for (int i = 0; i < VECS; i++) erased[i] += gain * load(before + k * all + j + i * LANES);
            }
        if (z.erase == WRITTEN)  // along the same vector: less is written
            UNROLL for (int i = 0; i < VECS; i++) value[i] -= erased[i];
        if (!before)
            rows<VECS, false, false>(z, j, before, now, value, erased);
        else if (erase && z.erase == OTHER)
            rows<VECS, true, true>(z, j, before, now, value, erased);
        else
            rows<VECS, true, false>(z, j, before, now, value, erased);
    }

    template <int VECS, bool BEFORE, bool TAKE>
    void rows(const Sizes& z, long j, const float* before, float* now, const Vec* value, const Vec* erased) {
        // local copies: for all that the compiler knows, a store to the state changes everything else
        const long K = z.K, all = z.all;
        const float *keeps = d, *adds = p, *takes = u, *meets = r;
        Vec read[VECS] = {}, come[VECS], gone[VECS];
        UNROLL for (int i = 0; i < VECS; i++) come[i] = value[i], gone[i] = erased[i];
        for (long k = 0; k < K; k++) {
            const Vec keep = splat(keeps[k]), add = splat(adds[k]), meet = splat(meets[k]);
            const Vec take = splat(TAKE ? takes[k] : 0.0f);
            UNROLL for (int i = 0; i < VECS; i++) {
                const long at = k * all + j + i * LANES;
                Vec s = add * come[i];
                if (BEFORE) s += keep * load(before + at);
                if (TAKE) s -= take * gone[i];
                store(now + at, s);
                read[i] += meet * s;
            }
        }
        UNROLL for (int i = 0; i < VECS; i++) store(o + j + i * LANES, read[i]);
    }

    void column(const Sizes& z, long j, const float* before, float* now, const float* erase, const float* along) {
        float erased = 0, read = 0;
        if (erase)
            for (long k = 0; k < z.K; k++) erased += erase[k] * before[k * z.all + j];
        for (long k = 0; k < z.K; k++) {
            float s = p[k] * v[j] + (before ? d[k] * before[k * z.all + j] : 0);
            if (erase) s -= along[k] * erased;
            now[k * z.all + j] = s;
            read += r[k] * s;
        }
        o[j] = read;
    }
};

}  // namespace
