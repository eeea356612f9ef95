// Softmax attention over blocks of keys, rows of queries by rows of queries; letters as in engines/softmax/README.md.
//
//     o_r = sum_{j in V_r} exp(s_rj - lse_r) v_j,    s_rj = f(scale q_r' k_j) + b_rj,    lse_r = log sum exp(s_rj)
//
// A row is one query of one head.  V_r is what its blocks (all, or those chosen for its query block), its interval of
// positions and the user's mask leave.  Rows come in parts that stay in the second cache with their running sums; for
// each block of keys, packed once per part, the rows that read it pass through small matrix products.  So rows that
// choose blocks one by one share the products of a block as well as rows that choose together.
#pragma once
#include "simd.hpp"

namespace {
namespace attention {

constexpr long TILE = 48;      // rows per product: a multiple of every TILE_ROWS
constexpr long FEW = 4;        // so few rows meet keys by scalar products: packing the keys would cost more
constexpr long CACHE = 65536;  // floats of a part's queries and sums
constexpr float NEVER = -INFINITY;

struct Table {  // numbers per batch, head and place; strides in elements, 0 where all are alike; data may be null
    const int32_t* data;
    int64_t batch, head;
    const int32_t* of(long b, long h) const { return data + b * batch + h * head; }
};

struct Field {  // a number for each batch, head, row and column; data may be null
    const void* data;
    int64_t batch, head, row, column;
    long at(long b, long h, long r) const { return b * batch + h * head + r * row; }
};

struct Call {
    long B, H, G, T, S, K, V, N, size;
    long together;         // heads whose rows share packed keys: a group, or 1 where each has keys of its own
    float scale, cap;      // cap: bound of the soft cap, 0 for none
    View q, k, v;
    Table choice;          // which row of `chosen` a query follows; -1 for a query that does not exist
    Table low, high, top;  // positions that a query sees: low..high, and those below top
    Table place;           // position of each query
    Table slot, position;  // of each place in the blocks: index of the key, -1 for none; null: 0, 1, 2, ...
    Field chosen;          // bytes [B, H, M, N], null: every block
    Field shown;           // bytes [B, H, M, *]: a key whose position / shown_size is set is seen elsewhere, or null
    long shown_size;
    Field bias, mask;      // floats and bytes [B, H, T, S], or null
    const float* slopes;   // [H], of the distance, or null
    View output;
    float* lse;            // [B, H, T]
    // backward
    View grad_output;
    const float* grad_lse;                  // or null
    float *grad_q, *grad_k, *grad_v;        // fp32, contiguous [B, H, T, K], [B, G, S, K], [B, G, S, V]
    float* grad_bias;                       // [B, H, S], sums over rows, or null
    long lanes() const { return H / together; }  // sets of heads that share packed keys
    long rows() const { return together * T; }   // of one lane
    long kv(long lane) const { return lane * together / (H / G); }
    long Kp() const { return round_up(K, LANES); }
    long Vp() const { return round_up(V, LANES); }
    long width() const { return round_up(size, LANES); }
    long part() const {
        const long n = CACHE / (Kp() + Vp());
        return n < TILE ? TILE : n > 1024 ? 1024 : n / TILE * TILE;
    }
    long parts() const { return (rows() + part() - 1) / part(); }
};

// The rows of one part, with what each of them may see.
struct Rows {
    long count, b, lane, g;
    int32_t *t, *head, *low, *high, *top, *place;
    const uint8_t **chosen, **shown;  // row of the choice, or null
    long least, most, first;  // smallest low, largest high, largest top
    Rows(Cursor& c, const Call& x) {
        const long n = x.part();
        int32_t** all[] = {&t, &head, &low, &high, &top, &place};
        for (int32_t** p : all) *p = (int32_t*)c.take(n);
        chosen = (const uint8_t**)c.take(n * sizeof(void*) / 4);
        shown = (const uint8_t**)c.take(n * sizeof(void*) / 4);
    }
    void fill(const Call& x, long batch, long own, long part) {
        const long from = part * x.part(), to = from + x.part() < x.rows() ? from + x.part() : x.rows();
        count = 0;
        b = batch;
        lane = own;
        g = x.kv(own);
        least = INT32_MAX;
        most = first = INT32_MIN;
        for (long r = from; r < to; r++) {
            const long h = lane * x.together + r / x.T, i = r % x.T;
            const int32_t choice = x.choice.of(b, h)[i];
            if (choice < 0) continue;
            t[count] = (int32_t)i;
            head[count] = (int32_t)h;
            low[count] = x.low.of(b, h)[i];
            high[count] = x.high.of(b, h)[i];
            top[count] = x.top.of(b, h)[i];
            place[count] = x.place.of(b, h)[i];
            chosen[count] = x.chosen.data ? (const uint8_t*)x.chosen.data + x.chosen.at(b, h, choice) : nullptr;
            shown[count] = x.shown.data ? (const uint8_t*)x.shown.data + x.shown.at(b, h, choice) : nullptr;
            least = low[count] < least ? low[count] : least;
            most = high[count] > most ? high[count] : most;
            first = top[count] > first ? top[count] : first;
            count++;
        }
    }
};

// One block of keys of one head, packed.
struct Keys {
    long n, count;               // places that hold a key are not always the first ones
    int32_t *index, *position;   // of each place, -1 and INT32_MAX where there is no key
    int32_t least, most;         // positions
    bool whole;                  // every place up to `size` holds a key
    float *rows, *turned;        // [width, Kp], [Kp, width]
    float *values, *values_turned;
    const float *key_rows, *value_rows;  // the packed copies, or the tensors' own memory
    long key_step, value_step;
    Keys(Cursor& c, const Call& x, bool backward) {
        index = (int32_t*)c.take(x.width());
        position = (int32_t*)c.take(x.width());
        rows = c.take(x.width() * x.Kp());
        turned = c.take(x.width() * x.Kp());
        values = c.take(x.width() * x.Vp());
        values_turned = c.take(backward ? x.width() * x.Vp() : 0);
    }
    // where the block's keys stand; false if it has none
    bool locate(const Call& x, long b, long h, long block) {
        n = block;
        least = INT32_MAX;
        most = INT32_MIN;
        count = 0;
        const int32_t* slots = x.slot.data ? x.slot.of(b, h) + block * x.size : nullptr;
        const int32_t* places = x.position.data ? x.position.of(b, h) + block * x.size : nullptr;
        for (long i = 0; i < x.width(); i++) {
            const long j = block * x.size + i;
            const int32_t at = i >= x.size ? -1 : slots ? slots[i] : j < x.S ? (int32_t)j : -1;
            index[i] = at;
            position[i] = at < 0 ? INT32_MAX : places ? places[i] : (int32_t)j;
            if (at < 0) continue;
            count++;
            least = position[i] < least ? position[i] : least;
            most = position[i] > most ? position[i] : most;
        }
        whole = count == x.size;
        return count > 0;
    }
    static void copy(const View& from, long b, long g, const int32_t* index, long width, long n, long np, float* out) {
        for (long i = 0; i < width; i++) {
            float* row = out + i * np;
            if (index[i] < 0) {
                memset(row, 0, np * 4);
                continue;
            }
            read_row(from, from.row(b, g, index[i]), n, 1.0f, row);
            for (long c = n; c < np; c++) row[c] = 0;
        }
    }
    // a run of rows in memory as they are needed, or null
    static const float* direct(const View& x, long b, long g, const int32_t* index, long width, long n) {
        if (x.kind != FP32 || x.channel != 1 || n % LANES || index[0] < 0) return nullptr;
        for (long i = 1; i < width; i++)
            if (index[i] != index[0] + i) return nullptr;
        return (const float*)x.row(b, g, index[0]);
    }
    void pack(const Call& x, long b, long g, bool turn, bool backward) {
        const float* own = direct(x.k, b, g, index, x.width(), x.K);
        key_rows = own ? own : rows;
        key_step = own ? x.k.token : x.Kp();
        if (!own) copy(x.k, b, g, index, x.width(), x.K, x.Kp(), rows);
        if (turn || backward) transpose(key_rows, key_step, x.width(), x.Kp(), turned, x.width());
        own = direct(x.v, b, g, index, x.width(), x.V);
        value_rows = own ? own : values;
        value_step = own ? x.v.token : x.Vp();
        if (!own) copy(x.v, b, g, index, x.width(), x.V, x.Vp(), values);
        if (backward) transpose(value_rows, value_step, x.width(), x.Vp(), values_turned, x.width());
    }
};

INLINE bool reads(const Rows& r, long i, const Keys& keys) {
    if (r.chosen[i] && !r.chosen[i][keys.n]) return false;
    return (keys.least <= r.high[i] && keys.most >= r.low[i]) || keys.least < r.top[i];
}

// Find the keys of a block and list the rows that read some of them; returns how many do.
INLINE long readers(const Call& x, const Rows& rows, Keys& keys, long block, int32_t* out) {
    if (!keys.locate(x, rows.b, rows.lane * x.together, block)) return 0;
    if ((keys.least > rows.most || keys.most < rows.least) && keys.least >= rows.first) return 0;
    long count = 0;
    for (long i = 0; i < rows.count; i++)
        if (reads(rows, i, keys)) out[count++] = (int32_t)i;
    return count;
}

// The soft cap of one row of scores, cap tanh(s / cap); the others' scores stay.
INLINE void soften(const Call& x, float* s) {
    if (!(x.cap > 0)) return;
    const Vec c = splat(x.cap), inverse = splat(1.0f / x.cap), one = splat(1.0f);
    for (long j = 0; j < x.width(); j += LANES) {
        // tanh |y| = (1 - e) / (1 + e) with e = exp(-2 |y|); near 0, where the difference loses digits, a polynomial
        const Vec y = load(s + j) * inverse, y2 = y * y, size = y < 0 ? -y : y, e = exp_vec(size * splat(-2.0f));
        const Vec near = y * (one + y2 * (splat(-0.33333333f) + y2 * (splat(0.13333333f) + y2 * splat(-0.053968254f))));
        const Vec far = (one - e) / (one + e), t = size < splat(0.15f) ? near : y < 0 ? -far : far;
        store(s + j, c * (y == y ? t : y));  // NaN stays NaN
    }
}

// What is added to one row of scores: distance and bias; and masks.
INLINE void modify(const Call& x, const Rows& r, long i, const Keys& keys, float* s) {
    const long width = x.width();
    if (x.slopes) {
        const Vec slope = splat(x.slopes[r.head[i]]);
        for (long j = 0; j < width; j += LANES) {
            IntVec p;
            memcpy(&p, keys.position + j, sizeof p);
            IntVec gap = p - (r.place[i] - (IntVec){});
            gap = gap < 0 ? -gap : gap;
            store(s + j, load(s + j) - slope * __builtin_convertvector(gap, Vec));
        }
    }
    if (x.bias.data) {
        const float* bias = (const float*)x.bias.data + x.bias.at(r.b, r.head[i], r.t[i]);
        for (long j = 0; j < x.size; j++)
            if (keys.index[j] >= 0) s[j] += bias[keys.index[j] * x.bias.column];
    }
    const bool inside = r.low[i] <= keys.least && keys.most <= r.high[i];
    if (!(inside && keys.count == width)) {
        const IntVec low = r.low[i] - (IntVec){}, high = r.high[i] - (IntVec){}, top = r.top[i] - (IntVec){};
        for (long j = 0; j < width; j += LANES) {
            IntVec p;
            memcpy(&p, keys.position + j, sizeof p);
            const IntVec seen = ((p >= low) & (p <= high)) | (p < top);
            const IntVec there = p != (INT32_MAX - (IntVec){});
            store(s + j, (seen & there) ? load(s + j) : splat(NEVER));
        }
    }
    if (r.shown[i])
        for (long j = 0; j < x.size; j++)
            if (keys.index[j] >= 0 && r.shown[i][keys.position[j] / x.shown_size]) s[j] = NEVER;
    if (x.mask.data) {
        const uint8_t* mask = (const uint8_t*)x.mask.data + x.mask.at(r.b, r.head[i], r.t[i]);
        for (long j = 0; j < x.size; j++)
            if (keys.index[j] >= 0 && !mask[keys.index[j] * x.mask.column]) s[j] = NEVER;
    }
}

INLINE float largest(const float* s, long n) {
    Vec m = splat(NEVER);
    for (long j = 0; j < n; j += LANES) {
        const Vec x = load(s + j);
        m = x > m ? x : m;
    }
    float most = m[0];
    UNROLL for (int i = 1; i < LANES; i++) most = m[i] > most ? m[i] : most;
    return most;
}

// Scalar products of a few rows with the block's keys: s[i][j] = q_i' k_j
INLINE void meet(long rows, const float* q, const Keys& keys, long Kp, long width, float* s) {
    for (long j = 0; j < width; j += LANES)
        for (long i = 0; i < rows; i++) {
            float sums[LANES * LANES] __attribute__((aligned(64))), turned[LANES * LANES] __attribute__((aligned(64)));
            UNROLL for (int m = 0; m < LANES; m++) {
                const float *a = q + i * Kp, *b = keys.key_rows + (j + m) * keys.key_step;
                Vec acc = {};
                for (long k = 0; k < Kp; k += LANES) acc += load(a + k) * load(b + k);
                store(sums + m * LANES, acc);
            }
            transpose(sums, LANES, LANES, LANES, turned, LANES);
            Vec total = load(turned);
            UNROLL for (int m = 1; m < LANES; m++) total += load(turned + m * LANES);
            store(s + i * width + j, total);
        }
}

// ---- forward ----------------------------------------------------------------------------------------------------

// A task is one part of the rows of one key head, over all blocks or one share of them.
class Forward {
   public:
    Forward(Cursor& c, const Call& x) : rows_(c, x), keys_(c, x, false) {
        const long P = x.part();
        q_ = c.take(P * x.Kp());
        sums_ = c.take(P * x.Vp());
        peak_ = c.take(P);
        total_ = c.take(P);
        gain_ = c.take(TILE);
        scores_ = c.take(TILE * x.width());
        tile_ = c.take(TILE * (x.Kp() > x.Vp() ? x.Kp() : x.Vp()));
        readers_ = (int32_t*)c.take(P);
    }

    // blocks [first, last) of the task; the sums stay here until finish() or keep()
    void run(const Call& x, long b, long lane, long part, long first, long last) {
        rows_.fill(x, b, lane, part);
        const long Kp = x.Kp(), Vp = x.Vp();
        for (long i = 0; i < rows_.count; i++) {
            read_row(x.q, x.q.row(b, rows_.head[i], rows_.t[i]), x.K, x.scale, q_ + i * Kp);
            for (long c = x.K; c < Kp; c++) q_[i * Kp + c] = 0;
            peak_[i] = NEVER;
            total_[i] = 0;
        }
        memset(sums_, 0, rows_.count * Vp * 4);
        for (long n = first; n < last; n++) block(x, n);
    }

    void finish(const Call& x) {
        for (long i = 0; i < rows_.count; i++) {
            float* o = sums_ + i * x.Vp();
            const bool empty = total_[i] == 0;
            const float inverse = empty ? 0.0f : 1.0f / total_[i];
            for (long c = 0; c < x.Vp(); c += LANES) store(o + c, load(o + c) * splat(inverse));
            put(x, i, o, empty ? NEVER : peak_[i] + logf(total_[i]));
        }
    }

    // partial results of a share: per row of the part the sums, then peak and total
    void keep(const Call& x, float* out) const {
        for (long i = 0; i < rows_.count; i++) {
            float* row = out + i * (x.Vp() + LANES);
            memcpy(row, sums_ + i * x.Vp(), x.Vp() * 4);
            row[x.Vp()] = peak_[i];
            row[x.Vp() + 1] = total_[i];
        }
    }

    // the sum of `shares` partial results
    void join(const Call& x, long b, long lane, long part, const float* in, long shares) {
        rows_.fill(x, b, lane, part);
        const long step = x.Vp() + LANES;
        for (long i = 0; i < rows_.count; i++) {
            float peak = NEVER, total = 0;
            for (long s = 0; s < shares; s++) {
                const float p = in[(s * x.part() + i) * step + x.Vp()];
                peak = p > peak ? p : peak;
            }
            float* o = sums_ + i * x.Vp();
            memset(o, 0, x.Vp() * 4);
            for (long s = 0; s < shares; s++) {
                const float* row = in + (s * x.part() + i) * step;
                const float weight = row[x.Vp()] == NEVER ? 0.0f : exp_one(row[x.Vp()] - peak);
                total += weight * row[x.Vp() + 1];
                if (weight == 0 && row[x.Vp() + 1] == row[x.Vp() + 1]) continue;
                for (long c = 0; c < x.Vp(); c += LANES) store(o + c, load(o + c) + splat(weight) * load(row + c));
            }
            peak_[i] = peak;
            total_[i] = total;
        }
        finish(x);
    }

    // rows that no query stands in give 0
    static void blank(const Call& x, long b, long lane, long part) {
        const long from = part * x.part(), to = from + x.part() < x.rows() ? from + x.part() : x.rows();
        float zero[512] = {};
        for (long r = from; r < to; r++) {
            const long h = lane * x.together + r / x.T, i = r % x.T;
            if (x.choice.of(b, h)[i] >= 0) continue;
            for (long c = 0; c < x.V; c += 512)
                write_row(x.output, (char*)x.output.row(b, h, i) + c * (x.output.kind == FP32 ? 4 : 2),
                          x.V - c < 512 ? x.V - c : 512, zero);
            x.lse[(b * x.H + h) * x.T + i] = NEVER;
        }
    }

   private:
    void put(const Call& x, long i, const float* o, float lse) {
        write_row(x.output, x.output.row(rows_.b, rows_.head[i], rows_.t[i]), x.V, o);
        x.lse[(rows_.b * x.H + rows_.head[i]) * x.T + rows_.t[i]] = lse;
    }

    void block(const Call& x, long n) {
        const long count = readers(x, rows_, keys_, n, readers_);
        if (!count) return;
        const bool few = count <= FEW;
        keys_.pack(x, rows_.b, rows_.g, !few, false);
        const long Kp = x.Kp(), Vp = x.Vp(), width = x.width();
        for (long start = 0; start < count; start += TILE) {
            const long m = count - start < TILE ? count - start : TILE;
            const int32_t* own = readers_ + start;
            const bool run = own[m - 1] - own[0] == m - 1;
            const float* q = q_ + own[0] * Kp;
            if (!run) {
                for (long i = 0; i < m; i++) memcpy(tile_ + i * Kp, q_ + own[i] * Kp, Kp * 4);
                q = tile_;
            }
            if (few)
                meet(m, q, keys_, Kp, width, scores_);
            else
                product<Into::Set>(m, width, x.K, {q, Kp, 1}, keys_.turned, width, scores_, width);
            for (long i = 0; i < m; i++) gain_[i] = weigh(x, own[i], scores_ + i * width);
            if (run) {
                product<Into::Scale>(m, Vp, x.size, {scores_, width, 1}, keys_.value_rows, keys_.value_step,
                                     sums_ + own[0] * Vp, Vp, gain_);
            } else {
                product<Into::Set>(m, Vp, x.size, {scores_, width, 1}, keys_.value_rows, keys_.value_step, tile_, Vp);
                for (long i = 0; i < m; i++) {
                    float* o = sums_ + own[i] * Vp;
                    for (long c = 0; c < Vp; c += LANES)
                        store(o + c, load(o + c) * splat(gain_[i]) + load(tile_ + i * Vp + c));
                }
            }
        }
    }

    // scores to weights; returns what the sums so far are to be multiplied by
    float weigh(const Call& x, long i, float* s) {
        const long width = x.width();
        soften(x, s);
        modify(x, rows_, i, keys_, s);
        const float before = peak_[i], now = largest(s, width), peak = now > before ? now : before;
        const float shift = peak == NEVER ? 0.0f : peak, gain = before == NEVER ? 0.0f : exp_one(before - shift);
        Vec total = {}, bad = {};
        for (long j = 0; j < width; j += LANES) {
            const Vec y = load(s + j), p = exp_vec(y - splat(shift));
            bad += y == y ? (Vec){} : y;  // a visible NaN must not vanish in comparisons
            store(s + j, p);
            total += p;
        }
        peak_[i] = peak;
        total_[i] = total_[i] * gain + sum(total + bad);
        return gain;
    }

    Rows rows_;
    Keys keys_;
    float *q_, *sums_, *peak_, *total_, *gain_, *scores_, *tile_;
    int32_t* readers_;
};

// ---- backward ---------------------------------------------------------------------------------------------------

// With p = exp(s - lse) and delta = do' o - dlse:  dv += p do,  ds = p (do' v - delta),  dq += ds k,  dk += ds q.
// A task is every pieces-th part of one lane; it adds to gradients of keys and values of its own.
class Backward {
   public:
    Backward(Cursor& c, const Call& x) : rows_(c, x), keys_(c, x, true) {
        const long P = x.part();
        q_ = c.take(P * x.Kp());
        grad_ = c.take(P * x.Vp());
        grad_q_ = c.take(P * x.Kp());
        lse_ = c.take(P);
        delta_ = c.take(P);
        weights_ = c.take(TILE * x.width());
        slopes_ = c.take(TILE * x.width());
        q_tile_ = c.take(TILE * x.Kp());
        grad_tile_ = c.take(TILE * x.Vp());
        out_tile_ = c.take(TILE * x.Kp());
        grad_k_ = c.take(x.width() * x.Kp());
        grad_v_ = c.take(x.width() * x.Vp());
        columns_ = c.take(x.width());
        row_ = c.take(x.Vp());
        readers_ = (int32_t*)c.take(P);
    }

    void run(const Call& x, long b, long lane, long piece, long pieces, float* grad_k, float* grad_v, float* grad_bias) {
        for (long part = piece; part < x.parts(); part += pieces) {
            rows_.fill(x, b, lane, part);
            load_rows(x);
            for (long n = 0; n < x.N; n++) block(x, n, grad_k, grad_v, grad_bias);
            for (long i = 0; i < rows_.count; i++) {
                float* out = x.grad_q + ((b * x.H + rows_.head[i]) * x.T + rows_.t[i]) * x.K;
                for (long c = 0; c < x.K; c++) out[c] = x.scale * grad_q_[i * x.Kp() + c];
            }
        }
    }

   private:
    void load_rows(const Call& x) {
        const long Kp = x.Kp(), Vp = x.Vp();
        for (long i = 0; i < rows_.count; i++) {
            const long b = rows_.b, h = rows_.head[i], t = rows_.t[i];
            read_row(x.q, x.q.row(b, h, t), x.K, x.scale, q_ + i * Kp);
            read_row(x.grad_output, x.grad_output.row(b, h, t), x.V, 1.0f, grad_ + i * Vp);
            read_row(x.output, x.output.row(b, h, t), x.V, 1.0f, row_);
            float met = 0;
            for (long c = 0; c < x.V; c++) met += row_[c] * grad_[i * Vp + c];
            for (long c = x.K; c < Kp; c++) q_[i * Kp + c] = 0;
            for (long c = x.V; c < Vp; c++) grad_[i * Vp + c] = 0;
            const long at = (b * x.H + h) * x.T + t;
            lse_[i] = x.lse[at];
            delta_[i] = met - (x.grad_lse && lse_[i] != NEVER ? x.grad_lse[at] : 0.0f);
        }
        memset(grad_q_, 0, rows_.count * Kp * 4);
    }

    void block(const Call& x, long n, float* grad_k, float* grad_v, float* grad_bias) {
        const long count = readers(x, rows_, keys_, n, readers_);
        if (!count) return;
        keys_.pack(x, rows_.b, rows_.g, true, true);
        const long Kp = x.Kp(), Vp = x.Vp(), width = x.width();
        memset(grad_k_, 0, width * Kp * 4);
        memset(grad_v_, 0, width * Vp * 4);
        for (long start = 0; start < count; start += TILE) {
            const long m = count - start < TILE ? count - start : TILE;
            const int32_t* own = readers_ + start;
            const bool run = own[m - 1] - own[0] == m - 1;
            const float *q = q_ + own[0] * Kp, *grad = grad_ + own[0] * Vp;
            if (!run) {
                for (long i = 0; i < m; i++) {
                    memcpy(q_tile_ + i * Kp, q_ + own[i] * Kp, Kp * 4);
                    memcpy(grad_tile_ + i * Vp, grad_ + own[i] * Vp, Vp * 4);
                }
                q = q_tile_;
                grad = grad_tile_;
            }
            product<Into::Set>(m, width, x.K, {q, Kp, 1}, keys_.turned, width, weights_, width);
            product<Into::Set>(m, width, x.V, {grad, Vp, 1}, keys_.values_turned, width, slopes_, width);
            for (long i = 0; i < m; i++)
                differentiate(x, own[i], weights_ + i * width, slopes_ + i * width, grad_bias);
            product<Into::Add>(width, Vp, m, {weights_, 1, width}, grad, Vp, grad_v_, Vp);
            product<Into::Add>(width, Kp, m, {slopes_, 1, width}, q, Kp, grad_k_, Kp);
            if (run) {
                product<Into::Add>(m, Kp, x.size, {slopes_, width, 1}, keys_.key_rows, keys_.key_step,
                                   grad_q_ + own[0] * Kp, Kp);
            } else {
                product<Into::Set>(m, Kp, x.size, {slopes_, width, 1}, keys_.key_rows, keys_.key_step, out_tile_, Kp);
                for (long i = 0; i < m; i++) {
                    float* o = grad_q_ + own[i] * Kp;
                    for (long c = 0; c < Kp; c += LANES) store(o + c, load(o + c) + load(out_tile_ + i * Kp + c));
                }
            }
        }
        for (long j = 0; j < x.size; j++) {
            if (keys_.index[j] < 0) continue;
            float *to_k = grad_k + keys_.index[j] * x.K, *to_v = grad_v + keys_.index[j] * x.V;
            for (long c = 0; c < x.K; c++) to_k[c] += grad_k_[j * Kp + c];
            for (long c = 0; c < x.V; c++) to_v[c] += grad_v_[j * Vp + c];
        }
    }

    // s: scores in, weights out.  d: gradient of the weights in, of the scaled products out.
    void differentiate(const Call& x, long i, float* s, float* d, float* grad_bias) {
        const long width = x.width();
        const Vec lse = splat(lse_[i]), delta = splat(delta_[i]), one = splat(1.0f);
        soften(x, s);
        const Vec inverse = splat(x.cap > 0 ? 1.0f / x.cap : 0.0f);
        for (long j = 0; j < width; j += LANES) {  // the cap's derivative: 1 - (s / cap)^2
            const Vec y = load(s + j) * inverse;
            store(columns_ + j, one - y * y);
        }
        modify(x, rows_, i, keys_, s);
        const bool empty = lse_[i] == NEVER;
        for (long j = 0; j < width; j += LANES) {
            const Vec p = empty ? (Vec){} : exp_vec(load(s + j) - lse);
            const Vec ds = p * (load(d + j) - delta);
            store(s + j, p);
            store(d + j, ds);
        }
        if (grad_bias) {
            float* sums = grad_bias + (rows_.head[i] - rows_.lane * x.together) * x.S;
            for (long j = 0; j < x.size; j++)
                if (keys_.index[j] >= 0) sums[keys_.index[j]] += d[j];
        }
        if (x.cap > 0)
            for (long j = 0; j < width; j += LANES) store(d + j, load(d + j) * load(columns_ + j));
    }

    Rows rows_;
    Keys keys_;
    float *q_, *grad_, *grad_q_, *lse_, *delta_, *weights_, *slopes_, *q_tile_, *grad_tile_, *out_tile_, *grad_k_,
        *grad_v_, *columns_, *row_;
    int32_t* readers_;
};

}  // namespace attention
}  // namespace
