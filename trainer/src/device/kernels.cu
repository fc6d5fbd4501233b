// The GPU kernels of the tables: lookup and pooling, the exact update, row index select (expand) and its backward
// pass (fold), the same between the elements of overlapping windows and padded rows, and kernels for the dense
// optimizer.
//
// Weights are stored in three arrays by type. Table rows are numbered across the arrays: rows before `bf16_row` are
// 32-bit floats, rows before `fp16_row` are bfloat16 (the upper halves of 32-bit floats), and the others are 16-bit
// floats of IEEE 754.
//
// NVRTC compiles this file when a GPU is opened. Tests compile it as C++ through `tests/host.cpp`, which runs threads
// one after the other, so kernels use neither shared memory nor barriers. Each thread computes one value of the
// result; neighbouring threads compute neighbouring columns. Every sum has a fixed order, so a step always gives the
// same bits.
//
// Arrays are row-major. `dim` is the number of columns of the tables, D. The rows of a table are contiguous and
// have one type.

#ifndef KERNEL
#define KERNEL extern "C" __global__ void
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;

#define THREAD ((i64)blockIdx.x * blockDim.x + threadIdx.x)

// The number of places that one thread sums; another thread sums the next chunk, even of the same table row.
#define CHUNK 32

// SigridHash with salt 0, before the modulus: Thomas Wang's mix, combined as in CityHash's Hash128to64
// (`ikjt/src/hash.rs`).
static __device__ u64 sigrid_mix(u64 k) {
    const u64 K = 0x9ddfea08eb382d69ULL;
    k = ~k + (k << 21);
    k ^= k >> 24;
    k = k + (k << 3) + (k << 8);
    k ^= k >> 14;
    k = k + (k << 2) + (k << 4);
    k ^= k >> 28;
    k = k + (k << 31);
    u64 a = k * K;
    a ^= a >> 47;
    u64 b = a * K;
    b ^= b >> 47;
    return b * K;
}

// Computes the table row of every id, `[count]`. Feature f has the ids from `starts[f]` on. `tables[3 f ..]`
// contains the first row of its table, the table's number of rows, and whether ids are hashed; other ids have been
// checked. If the first row is -1, the table is on other ranks, and all its ids get the row -1.
KERNEL table_rows(const i64 *ids, i64 count, const i64 *starts, const i64 *tables, int features, int *rows) {
    i64 i = THREAD;
    if (i >= count) return;
    int feature = 0, end = features;
    while (end - feature > 1) {
        int middle = (feature + end) / 2;
        if (starts[middle] <= i) feature = middle; else end = middle;
    }
    const i64 *table = tables + 3 * feature;
    if (table[0] < 0) {
        rows[i] = -1;
        return;
    }
    i64 row = ids[i];
    if (table[2]) {
        row = (i64)sigrid_mix((u64)row) % table[1];
        if (row < 0) row += table[1];
    }
    rows[i] = (int)(table[0] + row);
}

static __device__ float widen_fp16(u16 stored) {
    unsigned sign = (stored & 0x8000u) << 16, magnitude = stored & 0x7fffu;
    // Subnormal numbers are multiples of 2^-24. The bits of other numbers are moved to their positions in a 32-bit
    // float.
    if (magnitude < 0x400) return __uint_as_float(__float_as_uint(magnitude * 5.9604644775390625e-8f) | sign);
    unsigned special = magnitude >= 0x7c00 ? 0x7f800000u : 0;
    return __uint_as_float(((magnitude << 13) + (112u << 23)) | special | sign);
}

// Returns a weight as a 32-bit float.
static __device__ float load_weight(const float *fp32, const u16 *bf16, const u16 *fp16, int bf16_row, int fp16_row,
                                    int dim, i64 row, i64 column) {
    if (row < bf16_row) return fp32[row * dim + column];
    if (row < fp16_row) return __uint_as_float((unsigned)bf16[(row - bf16_row) * dim + column] << 16);
    return widen_fp16(fp16[(row - fp16_row) * dim + column]);
}

// Writes the weights of `rows`, `[count, dim]`; zeros where the row is -1.
KERNEL gather(const float *fp32, const u16 *bf16, const u16 *fp16, int bf16_row, int fp16_row, int dim, const int *rows,
              i64 count, float *output) {
    i64 i = THREAD;
    if (i >= count * dim) return;
    int row = rows[i / dim];
    output[i] = row < 0 ? 0.0f : load_weight(fp32, bf16, fp16, bf16_row, fp16_row, dim, row, i % dim);
}

// Writes `[bags, dim]`: bag b is `scales[b]` times the sum of the weights of elements
// `offsets[b] .. offsets[b] + sizes[b]`.
KERNEL pool(const float *fp32, const u16 *bf16, const u16 *fp16, int bf16_row, int fp16_row, int dim, const int *rows,
            const int *offsets, const int *sizes, const float *scales, i64 bags, float *output) {
    i64 i = THREAD;
    if (i >= bags * dim) return;
    i64 bag = i / dim, column = i % dim;
    i64 first = offsets[bag], end = first + sizes[bag];
    float sum = 0.0f;
    for (i64 element = first; element < end; element++) {
        sum += load_weight(fp32, bf16, fp16, bf16_row, fp16_row, dim, rows[element], column);
    }
    output[i] = scales[bag] * sum;
}

// Computes `[count]`: for every element, the position in `order` of the first row that may contain it. `reach[k]`
// is the largest end of the rows up to position k.
KERNEL first_rows(const int *reach, i64 rows, i64 count, int *output) {
    i64 element = THREAD;
    if (element >= count) return;
    i64 first = 0, end = rows;
    while (first < end) {
        i64 middle = (first + end) / 2;
        if (reach[middle] > element) end = middle; else first = middle + 1;
    }
    output[element] = (int)first;
}

// Computes `[count, dim]`: the gradient of every element, summed over the bags that contain it, in the order of
// `order` (by offset). `firsts` is the result of `first_rows`.
KERNEL unpool(const float *gradient, int dim, const int *offsets, const int *sizes, const float *scales,
              const int *order, const int *firsts, i64 bags, i64 count, float *output) {
    i64 i = THREAD;
    if (i >= count * dim) return;
    i64 element = i / dim, column = i % dim;
    float sum = 0.0f;
    for (i64 k = firsts[element]; k < bags; k++) {
        i64 bag = order[k];
        if (offsets[bag] > element) break;
        if (element < (i64)offsets[bag] + sizes[bag]) sum += scales[bag] * gradient[bag * dim + column];
    }
    output[i] = sum;
}

// Row index select: row r of the result is row `index[r]` of `values`, or row r without an index. The result has a
// row stride of `stride` floats.
KERNEL expand(const float *values, const int *index, i64 count, i64 width, float *output, i64 stride) {
    i64 i = THREAD;
    if (i >= count * width) return;
    i64 row = i / width, column = i % width;
    i64 source = index ? index[row] : row;
    output[row * stride + column] = values[source * width + column];
}

// The backward pass of `expand`, `[rows, width]`: row r is the sum of the rows `order[ends[r - 1] .. ends[r]]` of
// `values`, or row r of `values` without an order. `values` has a row stride of `stride` floats.
KERNEL fold(const float *values, i64 stride, const int *order, const int *ends, i64 rows, i64 width, float *output) {
    i64 i = THREAD;
    if (i >= rows * width) return;
    i64 row = i / width, column = i % width;
    if (!order) {
        output[i] = values[row * stride + column];
        return;
    }
    float sum = 0.0f;
    for (i64 k = row ? ends[row - 1] : 0; k < ends[row]; k++) sum += values[order[k] * stride + column];
    output[i] = sum;
}

// Returns the position of a vector in a message between ranks. Messages consist of blocks. Block b contains the
// vectors from number `blocks[4 b]` on, one after the other, beginning at float `blocks[4 b + 3]`. Its vectors are
// the `blocks[4 b + 2]` columns from column `blocks[4 b + 1]` on of their rows.
static __device__ i64 travelling(const i64 *block, i64 vector) {
    return block[3] + (vector - block[0]) * block[2];
}

// Adds the vectors from other ranks to `output`, `[rows, dim]`. Row r gets `scales[r]` times the sum of its
// vectors, which are `order[ends[r - 1] .. ends[r]]`; vector v is in block `of[v]`. Without scales, all scales are
// 1.
KERNEL collect(const float *values, const i64 *blocks, const int *of, const int *order, const int *ends, const float *scales,
               i64 rows, int dim, float *output) {
    i64 i = THREAD;
    if (i >= rows * dim) return;
    i64 row = i / dim, column = i % dim, first = row ? ends[row - 1] : 0;
    if (first == ends[row]) return;
    float sum = 0.0f;
    for (i64 k = first; k < ends[row]; k++) {
        i64 vector = order[k];
        const i64 *block = blocks + 4 * of[vector];
        i64 own = column - block[1];
        if (own >= 0 && own < block[2]) sum += values[travelling(block, vector) + own];
    }
    output[i] += scales ? scales[row] * sum : sum;
}

// The backward pass of `collect`: writes the gradient of each vector v, given the gradient of all rows, `[_, dim]`.
// Vector v belongs to row `rows[v]`.
KERNEL spread(const float *gradient, const i64 *blocks, const int *of, const int *rows, const float *scales, i64 count, int dim,
              float *output) {
    i64 i = THREAD;
    if (i >= count * dim) return;
    i64 vector = i / dim, column = i % dim;
    const i64 *block = blocks + 4 * of[vector];
    if (column >= block[2]) return;
    i64 row = rows[vector];
    float value = gradient[row * dim + block[1] + column];
    output[travelling(block, vector) + column] = scales ? scales[row] * value : value;
}

// Pads jagged rows to `[rows, longest, width]`, with zeros after their ends.
KERNEL pad(const float *values, i64 width, const int *offsets, const int *sizes, i64 rows, i64 longest, float *output) {
    i64 i = THREAD;
    if (i >= rows * longest * width) return;
    i64 column = i % width, position = i / width % longest, row = i / width / longest;
    output[i] = position < sizes[row] ? values[(offsets[row] + position) * width + column] : 0.0f;
}

// The backward pass of `pad`, `[count, width]`: the gradient of an element is the sum over all rows that contain
// it. `firsts` is the result of `first_rows`.
KERNEL unpad(const float *gradient, i64 width, const int *offsets, const int *sizes, const int *order, const int *firsts,
             i64 ordered, i64 longest, i64 count, float *output) {
    i64 i = THREAD;
    if (i >= count * width) return;
    i64 element = i / width, column = i % width;
    float sum = 0.0f;
    for (i64 k = firsts[element]; k < ordered; k++) {
        i64 row = order[k];
        if (offsets[row] > element) break;
        i64 position = element - offsets[row];
        if (position < sizes[row]) sum += gradient[(row * longest + position) * width + column];
    }
    output[i] = sum;
}

// A place is one lookup of an id. Places are sorted by table row, which is `keys[i]`; `order[i]` is the index of
// the element.
static __device__ bool is_first(const int *keys, i64 place) {
    return place == 0 || keys[place] != keys[place - 1];
}

// Sums the gradients of each table row within each chunk of places, and writes the sum to `sums[place]` of the
// row's first place in the chunk. The gradients of the first `pooled` elements are in `first`, the others in
// `second`.
KERNEL sum_chunks(const int *keys, const i64 *order, i64 count, const float *first, i64 pooled, const float *second,
                  int dim, float *sums) {
    i64 i = THREAD;
    i64 chunk = i / dim, column = i % dim;
    i64 place = chunk * CHUNK;
    if (place >= count) return;
    i64 end = place + CHUNK < count ? place + CHUNK : count;
    while (place < end) {
        i64 begin = place;
        int key = keys[begin];
        float sum = 0.0f;
        for (; place < end && keys[place] == key; place++) {
            i64 element = order[place];
            sum += element < pooled ? first[element * dim + column] : second[(element - pooled) * dim + column];
        }
        sums[begin * dim + column] = sum;
    }
}

// Adds the sums of all chunks of a table row, and writes the total to the row's first place.
KERNEL sum_rows(const int *keys, i64 count, int dim, float *sums) {
    i64 i = THREAD;
    if (i >= count * dim) return;
    i64 place = i / dim, column = i % dim;
    if (!is_first(keys, place)) return;
    float sum = sums[i];
    for (i64 next = (place / CHUNK + 1) * CHUNK; next < count && keys[next] == keys[place]; next += CHUNK)
        sum += sums[next * dim + column];
    sums[i] = sum;
}

// Scales the gradient of a table row down to the L2 norm `most` if it is longer.
KERNEL clip_rows(const int *keys, i64 count, int dim, float most, float *sums) {
    i64 place = THREAD;
    if (place >= count || !is_first(keys, place)) return;
    float *own = sums + place * dim, squares = 0.0f;
    for (int column = 0; column < dim; column++) squares += own[column] * own[column];
    float norm = sqrtf(squares);
    // The square may overflow although the gradient is finite.
    if (!(squares <= 3.402823466e38f)) {
        double wide = 0.0;
        for (int column = 0; column < dim; column++) wide += (double)own[column] * own[column];
        norm = (float)sqrt(wide);
    }
    if (!(norm > most)) return;
    float scale = most / norm;
    for (int column = 0; column < dim; column++) own[column] *= scale;
}

// Row-wise Adagrad: adds the mean of the squared gradient to the accumulator of each table row, and writes the
// factor of the row's gradient to `steps[place]`. If `permit` is given and 0, nothing changes.
KERNEL accumulate_rows(const int *keys, i64 count, int dim, const float *sums, float rate, float eps, float *state,
                       float *steps, const int *permit) {
    i64 place = THREAD;
    if (place >= count || !is_first(keys, place) || (permit && !*permit)) return;
    float squares = 0.0f;
    for (int column = 0; column < dim; column++) {
        float g = sums[place * dim + column];
        squares += g * g;
    }
    float accumulated = state[keys[place]] + squares / dim;
    state[keys[place]] = accumulated;
    steps[place] = rate / (sqrtf(accumulated) + eps);
}

// Advances SplitMix64 by one step and applies its finalizer (see `kernels/element.rs`, also for the rounding
// below).
static __device__ u64 mixed(u64 bits) {
    bits += 0x9e3779b97f4a7c15ULL;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
    return bits ^ (bits >> 31);
}

// Returns 32 random bits for a weight. `noise` is the key of the step. Row t of `tables` contains the first row of
// a table or of a shard, the index of the table, and the row and column of its first weight within the whole table.
static __device__ unsigned random_bits(u64 noise, const i64 *tables, int count, i64 row, i64 column) {
    int table = 0, end = count;
    while (end - table > 1) {
        int middle = (table + end) / 2;
        if (tables[4 * middle] <= row) table = middle; else end = middle;
    }
    const i64 *own = tables + 4 * table;
    u64 key = mixed(noise ^ (u64)own[1]);
    unsigned bits = (unsigned)(mixed(key ^ (u64)(row - own[0] + own[2])) >> 32) + (unsigned)(column + own[3]) * 0x9e3779b9u;
    bits = (bits ^ (bits >> 16)) * 0x7feb352du;
    bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
    return bits ^ (bits >> 16);
}

// Rounds to bfloat16, up with a probability equal to the truncated fraction; `noise` has 16 bits.
static __device__ u16 narrow_bf16(float value, unsigned noise) {
    unsigned sign = __float_as_uint(value) & 0x80000000u, magnitude = __float_as_uint(value) & 0x7fffffffu;
    unsigned kept = magnitude + noise < 0x7f7fffffu ? magnitude + noise : 0x7f7fffffu;
    // The quiet bit keeps a NaN from becoming infinity when its lower bits are cut off.
    if (magnitude >= 0x7f800000u) kept = magnitude > 0x7f800000u ? magnitude | 0x400000u : magnitude;
    return (u16)((sign | kept) >> 16);
}

// Rounds to fp16 in the same way; `noise` has 13 bits. The smallest normal number, 2^-14, is added to smaller
// values, so that all their steps have the same size.
static __device__ u16 narrow_fp16(float value, unsigned noise) {
    unsigned sign = (__float_as_uint(value) >> 16) & 0x8000u, magnitude = __float_as_uint(value) & 0x7fffffffu;
    unsigned shifted = magnitude, base = 112u << 23;
    if (magnitude < 113u << 23) {
        shifted = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(113u << 23));
        base = 113u << 23;
    }
    unsigned kept = (shifted + noise - base) >> 13;
    if (kept > 0x7bff) kept = 0x7bff;
    if (magnitude >= 0x7f800000u) kept = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
    return (u16)(sign | kept);
}

// Returns the value that a table row's update subtracts from a weight (see `kernels/update.rs` for the rules).
// `rule` is 0 for SGD, 1 for Adagrad, 2 for row-wise Adagrad with the given `step`, and 3 for Adam, where `unbias`
// is one minus the powers of its decays.
static __device__ float change(int rule, float rate, float eps, float beta1, float beta2, float unbias1, float unbias2,
                               float step, float g, float *state, int dim, i64 row, i64 column) {
    if (rule == 0) return rate * g;
    if (rule == 1) {
        float sum = state[row * dim + column] + g * g;
        state[row * dim + column] = sum;
        return rate * g / (sqrtf(sum) + eps);
    }
    if (rule == 2) return step * g;
    i64 mean = 2 * row * dim + column, square = mean + dim;
    float m = beta1 * state[mean] + (1.0f - beta1) * g;
    float v = beta2 * state[square] + (1.0f - beta2) * g * g;
    state[mean] = m;
    state[square] = v;
    return rate * (m / unbias1) / (sqrtf(v / unbias2) + eps);
}

// Updates every table row once. If `marks` is given, sets the mark of each updated row to 1. If `permit` is given
// and 0, nothing changes.
KERNEL update(const int *keys, i64 count, int dim, const float *sums, int rule, float rate, float eps, float beta1,
              float beta2, float unbias1, float unbias2, const float *steps, float *fp32, u16 *bf16, u16 *fp16,
              int bf16_row, int fp16_row, const i64 *tables, int table_count, i64 noise, float *state,
              unsigned char *marks, const int *permit) {
    i64 i = THREAD;
    if (i >= count * dim || (permit && !*permit)) return;
    i64 place = i / dim, column = i % dim;
    if (!is_first(keys, place)) return;
    i64 row = keys[place];
    if (marks && column == 0) marks[row] = 1;
    float step = steps ? steps[place] : 0.0f;
    float weight = load_weight(fp32, bf16, fp16, bf16_row, fp16_row, dim, row, column) -
                   change(rule, rate, eps, beta1, beta2, unbias1, unbias2, step, sums[i], state, dim, row, column);
    if (row < bf16_row) {
        fp32[row * dim + column] = weight;
        return;
    }
    unsigned bits = random_bits((u64)noise, tables, table_count, row, column);
    if (row < fp16_row) bf16[(row - bf16_row) * dim + column] = narrow_bf16(weight, bits >> 16);
    else fp16[(row - fp16_row) * dim + column] = narrow_fp16(weight, bits >> 19);
}

// Thread t sums the squares of the values t, t + threads, t + 2 threads and so on. The square of a float is exact
// as a double and never overflows, so a sum is finite unless a value is not.
KERNEL square_sums(const float *values, i64 count, i64 threads, double *sums) {
    i64 i = THREAD;
    if (i >= threads) return;
    double sum = 0.0;
    for (i64 k = i; k < count; k += threads) sum += (double)values[k] * values[k];
    sums[i] = sum;
}

// Reduces sums in the same way, without squaring.
KERNEL add_up(const double *sums, i64 count, i64 threads, double *output) {
    i64 i = THREAD;
    if (i >= threads) return;
    double sum = 0.0;
    for (i64 k = i; k < count; k += threads) sum += sums[k];
    output[i] = sum;
}

// Decides whether a step may be taken: not if its loss or a gradient is not finite. `dense` and `tables` are sums
// of squared gradients; absent inputs count as finite. `found` receives the loss, the norm of the dense gradient,
// and `tables`. Dividing the dense gradient by `divisor` limits its norm to `most`, like
// `torch.nn.utils.clip_grad_norm_`. `refused` (for libtorch's optimizers) and `permit` (for our kernels) contain
// the decision.
KERNEL judge(const float *loss, const double *dense, const double *tables, float most, double *found, float *divisor,
             float *refused, int *permit) {
    if (THREAD > 0) return;
    double norm = sqrt(dense[0]);
    found[0] = loss ? loss[0] : 0.0;
    found[1] = norm;
    found[2] = tables ? tables[0] : 0.0;
    int finite = 1;
    // The difference is zero for finite numbers only.
    for (int k = 0; k < 3; k++)
        if (!(found[k] - found[k] == 0.0)) finite = 0;
    *permit = finite;
    *refused = finite ? 0.0f : 1.0f;
    double ratio = (norm + 1e-6) / most;
    *divisor = ratio > 1.0 ? (float)ratio : 1.0f;
}
