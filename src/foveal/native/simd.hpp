// Vectors, small matrix products and loads for all kernels: GCC and Clang vector extensions, no intrinsics.
// A translation unit sets LANES (floats per vector) and is compiled for one instruction set.  Everything here has
// internal linkage, so that the linker never takes one instruction set's code for another's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <cerrno>
#include <sys/mman.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }

INLINE Vec load(const float* p) { return *(const Loose*)p; }
INLINE void store(float* p, Vec v) { *(Loose*)p = v; }
INLINE Vec splat(float x) { return x - (Vec){}; }
INLINE float sum(Vec v) {
    float total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// exp for x <= 0: relative error below 2e-7, exactly 1 at 0 and exactly 0 below -87.
INLINE Vec exp_vec(Vec x) {
    const Vec low = splat(-87.0f);
    Vec kept = x > low ? x : low;
    Vec shifted = kept * splat(1.44269504f) + splat(12582912.0f);  // round to nearest in the low mantissa bits
    Vec n = shifted - splat(12582912.0f);
    Vec r = kept - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    Vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    IntVec bits = (IntVec)p + ((IntVec)shifted << 23);
    return x > low ? (Vec)bits : (Vec){};
}

INLINE float exp_one(float x) { return exp_vec(splat(x))[0]; }

// ---- matrix products: C (+)= A B, A of any strides, B and C with contiguous rows -------------------------------

#if LANES == 16
constexpr int TILE_ROWS = 8, TILE_VECS = 2;
#elif LANES == 8
constexpr int TILE_ROWS = 6, TILE_VECS = 2;
#else
constexpr int TILE_ROWS = 4, TILE_VECS = 2;
#endif

struct Left {  // element (i, k) of A stands at data[i * row + k * col]
    const float* data;
    long row, col;
    Left at(long i, long k) const { return {data + i * row + k * col, row, col}; }
};

enum class Into { Set, Add, Scale };  // Scale: C = gain[i] C + A B

template <int ROWS, int VECS, Into MODE>
INLINE void tile(long depth, Left a, const float* b, long ldb, float* c, long ldc, const float* gain) {
    Vec acc[ROWS][VECS];
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < VECS; j++) {
        if (MODE == Into::Set) acc[i][j] = (Vec){};
        if (MODE == Into::Add) acc[i][j] = load(c + i * ldc + j * LANES);
        if (MODE == Into::Scale) acc[i][j] = load(c + i * ldc + j * LANES) * splat(gain[i]);
    }
    for (long k = 0; k < depth; k++) {
        Vec right[VECS];
        UNROLL for (int j = 0; j < VECS; j++) right[j] = load(b + k * ldb + j * LANES);
        UNROLL for (int i = 0; i < ROWS; i++) {
            Vec left = splat(a.data[i * a.row + k * a.col]);
            UNROLL for (int j = 0; j < VECS; j++) acc[i][j] += left * right[j];
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < VECS; j++) store(c + i * ldc + j * LANES, acc[i][j]);
}

template <int ROWS, Into MODE>
INLINE void strip(long width, long depth, Left a, const float* b, long ldb, float* c, long ldc, const float* gain) {
    long j = 0;
    for (; j + TILE_VECS * LANES <= width; j += TILE_VECS * LANES)
        tile<ROWS, TILE_VECS, MODE>(depth, a, b + j, ldb, c + j, ldc, gain);
    for (; j < width; j += LANES) tile<ROWS, 1, MODE>(depth, a, b + j, ldb, c + j, ldc, gain);
}

// Which part of a product is needed.  LowerOut: only columns up to the row; LowerLeft: A is 0 right of its diagonal;
// UpperLeft: A is 0 left of it.
enum class Part { All, LowerOut, LowerLeft, UpperLeft };

// width is a multiple of LANES; the columns of C beyond the wanted part may be overwritten up to a tile's edge.
template <Into MODE, Part PART = Part::All>
static void product(long rows, long width, long depth, Left a, const float* b, long ldb, float* c, long ldc,
                    const float* gain = nullptr) {
    for (long i = 0; i < rows;) {
        const long left = rows - i, n = left >= TILE_ROWS ? TILE_ROWS : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        long wide = width, from = 0, to = depth;
        if (PART == Part::LowerOut) {
            wide = round_up(i + n, LANES);
            wide = wide < width ? wide : width;
        }
        if (PART == Part::LowerLeft) to = i + n < depth ? i + n : depth;
        if (PART == Part::UpperLeft) from = i;
        const Left own = a.at(i, from);
        const float* rest = b + from * ldb;
        const float* g = MODE == Into::Scale ? gain + i : nullptr;
        switch (n) {
            case TILE_ROWS: strip<TILE_ROWS, MODE>(wide, to - from, own, rest, ldb, c + i * ldc, ldc, g); break;
#if LANES != 4
            case 4: strip<4, MODE>(wide, to - from, own, rest, ldb, c + i * ldc, ldc, g); break;
#endif
            case 2: strip<2, MODE>(wide, to - from, own, rest, ldb, c + i * ldc, ldc, g); break;
            default: strip<1, MODE>(wide, to - from, own, rest, ldb, c + i * ldc, ldc, g);
        }
        i += n;
    }
}

// out[c][r] = in[r][c]; rows and cols are multiples of LANES.
INLINE void transpose(const float* in, long ldi, long rows, long cols, float* out, long ldo) {
    for (long r = 0; r < rows; r += LANES)
        for (long c = 0; c < cols; c += LANES) {
#if LANES == 8
            Vec a[8], b[8], e[8];
            UNROLL for (int i = 0; i < 8; i++) a[i] = load(in + (r + i) * ldi + c);
            const IntVec low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
            const IntVec low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = {2, 3, 10, 11, 6, 7, 14, 15};
            const IntVec first = {0, 1, 2, 3, 8, 9, 10, 11}, second = {4, 5, 6, 7, 12, 13, 14, 15};
#if defined(__clang__)
#define SHUFFLE(x, y, m) __builtin_shufflevector(x, y, m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7])
#else
#define SHUFFLE(x, y, m) __builtin_shuffle(x, y, m)
#endif
            UNROLL for (int i = 0; i < 4; i++) {
                b[2 * i] = SHUFFLE(a[2 * i], a[2 * i + 1], low);
                b[2 * i + 1] = SHUFFLE(a[2 * i], a[2 * i + 1], high);
            }
            UNROLL for (int h = 0; h < 2; h++) {
                e[4 * h + 0] = SHUFFLE(b[4 * h], b[4 * h + 2], low2);
                e[4 * h + 1] = SHUFFLE(b[4 * h], b[4 * h + 2], high2);
                e[4 * h + 2] = SHUFFLE(b[4 * h + 1], b[4 * h + 3], low2);
                e[4 * h + 3] = SHUFFLE(b[4 * h + 1], b[4 * h + 3], high2);
            }
            UNROLL for (int i = 0; i < 4; i++) {
                store(out + (c + i) * ldo + r, SHUFFLE(e[i], e[4 + i], first));
                store(out + (c + 4 + i) * ldo + r, SHUFFLE(e[i], e[4 + i], second));
            }
#undef SHUFFLE
#else
            for (int i = 0; i < LANES; i++)
                for (int j = 0; j < LANES; j++) out[(c + j) * ldo + r + i] = in[(r + i) * ldi + c + j];
#endif
        }
}

// ---- tensors in memory: fp32, bf16 or fp16, any strides ---------------------------------------------------------

enum Kind : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE uint16_t to_bf16(float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct View {  // [B, H, T, width]; strides in elements; data is null for a tensor that is not there
    void* data;
    int64_t batch, head, token, channel, kind;
    void* row(long b, long h, long t) const {
        return (char*)data + (b * batch + h * head + t * token) * (kind == FP32 ? 4 : 2);
    }
    View from(long first) const {  // without the channels before the first
        View v = *this;
        v.data = (char*)data + first * channel * (kind == FP32 ? 4 : 2);
        return v;
    }
};

// A call as a flat list of 64-bit words, which Python writes.
struct Words {
    const int64_t* at;
    long number() { return (long)*at++; }
    template <class T>
    T* pointer() { return (T*)(intptr_t)*at++; }
    // address and kind, then four strides; fp32 in the order of its axes [B, heads, tokens, width] is -1 and no strides
    View view(long heads, long tokens, long width) {
        View v;
        v.data = pointer<void>();
        v.kind = *at++;
        if (v.kind < 0) {
            v.kind = FP32;
            v.channel = 1;
            v.token = width;
            v.head = tokens * width;
            v.batch = heads * v.head;
            return v;
        }
        v.batch = *at++;
        v.head = *at++;
        v.token = *at++;
        v.channel = *at++;
        return v;
    }
};

// n elements of a row as floats, times a factor
INLINE void read_row(const View& v, const void* row, long n, float factor, float* out) {
    const long s = v.channel;
    if (v.kind == FP32) {
        const float* x = (const float*)row;
        if (s == 1)
            for (long i = 0; i < n; i++) out[i] = x[i] * factor;
        else
            for (long i = 0; i < n; i++) out[i] = x[i * s] * factor;
    } else if (v.kind == BF16) {
        const uint16_t* x = (const uint16_t*)row;
        for (long i = 0; i < n; i++) out[i] = from_bf16(x[i * s]) * factor;
    } else {
        const _Float16* x = (const _Float16*)row;
        for (long i = 0; i < n; i++) out[i] = (float)x[i * s] * factor;
    }
}

INLINE void write_row(const View& v, void* row, long n, const float* x) {  // contiguous rows only
    if (v.kind == FP32) {
        memcpy(row, x, n * 4);
    } else if (v.kind == BF16) {
        uint16_t* y = (uint16_t*)row;
        for (long i = 0; i < n; i++) y[i] = to_bf16(x[i]);
    } else {
        _Float16* y = (_Float16*)row;
        for (long i = 0; i < n; i++) y[i] = (_Float16)x[i];
    }
}

// ---- working memory and the processor's mode --------------------------------------------------------------------

// A workspace class takes its buffers from a Cursor: first from one that only counts, then from the real block.
class Cursor {
   public:
    explicit Cursor(float* base) : base_(base) {}
    float* take(size_t floats) {
        const size_t here = used_;
        used_ += (floats + 15) / 16 * 16;
        return base_ ? base_ + here : nullptr;
    }
    size_t used() const { return used_; }

   private:
    float* base_;
    size_t used_ = 0;
};

// Fresh memory of many MiB comes page by page, which costs as much as some of the products: ask for larger pages.
// Linux only; whole huge pages of the range alone; where it is refused, nothing changes.
INLINE void expect_writes(void* p, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t HUGE_PAGE = 2 << 20, LEAST = 2 * HUGE_PAGE;
    const uintptr_t first = ((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t last = ((uintptr_t)p + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (p && bytes >= LEAST && first < last) {
        const int before = errno;
        (void)madvise((void*)first, last - first, MADV_HUGEPAGE);
        errno = before;
    }
#else
    (void)p, (void)bytes;
#endif
}

class Block {  // aligned memory of a task; null if there is none to be had
   public:
    explicit Block(size_t floats) {
        void* p = nullptr;
        data_ = posix_memalign(&p, 64, (floats + 16) * 4) ? nullptr : (float*)p;
    }
    ~Block() { free(data_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    float* data() const { return data_; }

   private:
    float* data_;
};

// Products of decays run into denormal numbers, on which processors are a hundred times slower: flush them to 0.
class FlushDenormals {
   public:
#if defined(__SSE__)
    FlushDenormals() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8000); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

   private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

   private:
    uint64_t before_;
#endif
};

}  // namespace
