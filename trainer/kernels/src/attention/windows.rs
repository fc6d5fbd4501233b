//! The windows of a chain: they turn the scores of a block of queries into shares, or into gradients.
//!
//! For each query, every window that contains the query needs the sum of the query's exponentials over the window's
//! elements. The backward pass also needs the sum of the exponentials times the gradients of the shares. With few
//! windows, each window sums its slices. With many windows, all sums are computed together as matrix products. M
//! and G have a column per window: M contains its members (zeros and ones), G its gradients. For a block of
//! exponentials E, the sums are `E M` and `E G`, the shares are `Fᵀ E`, and the factors of the scores' gradients
//! are `F Gᵀ - (F ∘ c) Mᵀ`, where F contains `1 / (L Z_i(w))` for the windows of a query and zeros for the others.

use super::Sequence;
use super::plan::Chain;
use crate::gemm::{Strided, gemm, transpose};
use crate::simd::{Lanes, WIDTH, axpy, dispatched, dot, sum};

/// The smallest sum of a window's exponentials, relative to the maximum score of the chain. A window with a smaller
/// sum is computed separately. With larger sums, exponentials that underflow to zero are below a float's precision.
const SMALLEST_SUM: f32 = 1e-20;

/// The number of windows from which matrix products are faster than slices.
const MANY: usize = 4;

/// The range of a window, or of keys, within the chain.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
}

impl Span {
    fn contains(self, query: usize) -> bool {
        (self.start..self.end).contains(&query)
    }

    fn len(self) -> usize {
        self.end - self.start
    }
}

/// The windows of one chain at a time, in buffers that grow. n is the chain's length, W the number of windows, H
/// the number of heads, and `stride` the row stride of scores.
#[derive(Debug, Default)]
pub(super) struct Windows {
    spans: Vec<Span>,
    /// For each query, the range from the first to the last key that any of its windows contains.
    hulls: Vec<Span>,
    stride: usize,
    /// C: W rounded up to whole vectors; 0 if windows sum slices.
    columns: usize,
    /// The smallest sum of each window's exponentials so far, `[C]` or `[W]`.
    least: Vec<f32>,
    /// 1 ÷ the length of each window, `[C]`.
    scales: Vec<f32>,
    /// Mᵀ and Gᵀ, `[2 C, stride]`.
    by_window: Vec<f32>,
    /// M beside G, `[stride, 2 C]`.
    by_element: Vec<f32>,
    /// The transposed upstream gradients, `[D, H C]`.
    upstream: Vec<f32>,
    /// The gradients of shares: `[n, H C]`, including elements outside of windows, or `[H, W, stride]`, with valid
    /// values only inside windows.
    gradients: Vec<f32>,
    /// The row stride of `gradients`, H C.
    gradient_width: usize,
    /// The head that is computed.
    head: usize,
    /// The sums of each query by window, then the factors that multiply `by_window`, `[queries, 2 C]`.
    sums: Vec<f32>,
    /// The factors of the scores' gradients, `[queries, stride]`.
    factors: Vec<f32>,
}

/// Returns `len` zeros in a buffer that never shrinks.
pub(super) fn zeros(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.clear();
    buffer.resize(len, 0.0);
    buffer
}

/// Returns `len` unspecified values in a buffer that never shrinks.
pub(super) fn any(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Windows {
    /// Starts a chain.
    pub(super) fn of(&mut self, sequence: &Sequence<'_>, chain: &Chain, stride: usize) {
        let span = |&window: &u32| {
            let start = sequence.offsets[window as usize] as usize - chain.start;
            Span { start, end: start + sequence.sizes[window as usize] as usize }
        };
        let Self { spans, hulls, .. } = self;
        spans.clear();
        spans.extend(chain.windows.iter().map(span));
        hulls.clear();
        hulls.extend((0..chain.span()).map(|query| hull(spans, query)));
        let many = spans.len() >= MANY;
        (self.stride, self.columns) = (stride, if many { spans.len().next_multiple_of(WIDTH) } else { 0 });
        self.least.clear();
        self.least.resize(spans.len().max(self.columns), f32::MAX);
        if many {
            self.arrange();
        }
    }

    /// Computes the matrix of members, and its transpose.
    fn arrange(&mut self) {
        let Self { spans, stride, columns, scales, by_window, by_element, .. } = self;
        let scales = zeros(scales, *columns);
        scales.iter_mut().zip(&*spans).for_each(|(scale, span)| *scale = 1.0 / span.len() as f32);
        let by_window = zeros(by_window, 2 * *columns * *stride);
        for (members, span) in by_window.chunks_exact_mut(*stride).zip(&*spans) {
            members[span.start..span.end].fill(1.0);
        }
        let by_element = zeros(by_element, *stride * 2 * *columns);
        transpose((spans.len(), *stride), by_window, *stride, by_element, 2 * *columns);
    }

    /// Returns the windows that must be computed separately, by index in the chain.
    pub(super) fn alone(&self) -> impl Iterator<Item = usize> {
        (0..self.spans.len()).filter(|&window| self.least[window] < SMALLEST_SUM)
    }

    /// Computes the gradients of shares from the gradients of the outputs, `[H, W, D]`, and the elements' vectors,
    /// `[n, D]`. The gradient of an element's share in a window is the dot product of its vector and the window's
    /// gradient.
    pub(super) fn take_upstream(&mut self, upstream: &[f32], vectors: &[f32], dim: usize) {
        let Self { spans, stride, columns, gradients, .. } = self;
        let (windows, columns) = (spans.len(), *columns);
        let heads = upstream.len() / (windows * dim);
        if columns == 0 {
            dots(any(gradients, heads * windows * *stride), *stride, upstream, vectors, dim, spans);
            return;
        }
        let (width, elements) = (heads * columns, vectors.len() / dim);
        let transposed = zeros(&mut self.upstream, dim * width);
        for (head, upstream) in upstream.chunks_exact(windows * dim).enumerate() {
            transpose((windows, dim), upstream, dim, &mut transposed[head * columns..], width);
        }
        self.gradient_width = width;
        let gradients = any(gradients, elements * width);
        gemm((elements, width, dim), Strided::rows(vectors, dim), transposed, width, gradients, width, false);
    }

    /// Selects the head whose gradients are computed.
    pub(super) fn take_head(&mut self, head: usize) {
        self.head = head;
        let (columns, stride) = (self.columns, self.stride);
        if columns > 0 {
            let (n, windows) = (self.hulls.len(), self.spans.len());
            let width = self.gradient_width;
            mask(&mut self.by_element, 2 * columns, &self.gradients[head * columns..], width, n);
            let (own, by_window) = (&self.by_element[columns..], &mut self.by_window[columns * stride..]);
            transpose((n, windows), own, 2 * columns, by_window, stride);
        }
    }

    /// Replaces the scores of the queries from `first` on by their exponentials, and adds `e_ij / (L Z_i)` to
    /// `shares[w][j]` for every query i and element j of window w. Shares outside of windows are unspecified until
    /// [`clear_outside`](Self::clear_outside); shares of the windows in [`alone`](Self::alone) are never valid.
    pub(super) fn attend(&mut self, scores: &mut [f32], first: usize, shares: &mut [f32]) {
        let Self { spans, hulls, stride, columns, least, scales, by_element, .. } = self;
        let (stride, width) = (*stride, 2 * *columns);
        let hulls = &hulls[first..];
        if width == 0 {
            attend_one_by_one(scores, stride, first, hulls, spans, shares, least);
            return;
        }
        exponentials_of_rows(scores, stride, hulls);
        let rows = scores.len() / stride;
        let sums = any(&mut self.sums, rows * width);
        gemm((rows, *columns, stride), Strided::rows(scores, stride), by_element, width, sums, width, false);
        invert_sums(sums, &by_element[first * width..], width, scales, least);
        let sums = Strided::transposed(sums, width);
        gemm((spans.len(), stride, rows), sums, scores, stride, shares, stride, true);
    }

    /// Replaces the scores of the queries from `first` on by their gradients,
    /// `e_ij Σ_w (g_j(w) - c_i(w)) / (L Z_i(w))` with `c_i(w) = Σ_j e_ij g_j(w) / Z_i(w)`, and adds to the shares
    /// like [`attend`](Self::attend).
    pub(super) fn score_gradients(&mut self, scores: &mut [f32], first: usize, shares: &mut [f32]) {
        let Self { spans, hulls, stride, columns, scales, by_element, .. } = self;
        let (stride, width) = (*stride, 2 * *columns);
        let hulls = &hulls[first..];
        if width == 0 {
            let gradients = &self.gradients[self.head * spans.len() * stride..];
            let factors = any(&mut self.factors, stride);
            gradients_one_by_one(scores, stride, first, hulls, spans, shares, gradients, factors);
            return;
        }
        exponentials_of_rows(scores, stride, hulls);
        let rows = scores.len() / stride;
        let sums = any(&mut self.sums, rows * width);
        gemm((rows, width, stride), Strided::rows(scores, stride), by_element, width, sums, width, false);
        centre_sums(sums, &by_element[first * width..], width, scales);
        let of_gradients = Strided::transposed(&sums[*columns..], width);
        gemm((spans.len(), stride, rows), of_gradients, scores, stride, shares, stride, true);
        let factors = any(&mut self.factors, rows * stride);
        gemm(
            (rows, stride, width),
            Strided::rows(sums, width),
            &self.by_window,
            stride,
            factors,
            stride,
            false,
        );
        multiply_all(scores, factors);
    }

    /// Sets the shares `[W, stride]` outside of windows to zero.
    pub(super) fn clear_outside(&self, shares: &mut [f32]) {
        if self.columns > 0 {
            for (shares, span) in shares.chunks_exact_mut(self.stride).zip(&self.spans) {
                shares[..span.start].fill(0.0);
                shares[span.end..].fill(0.0);
            }
        }
    }
}

/// Returns the range from the first to the last key that any window with `query` contains; empty if no window
/// contains it.
fn hull(spans: &[Span], query: usize) -> Span {
    let mut meets = spans.iter().filter(|span| span.contains(query));
    let first = meets.next().copied().unwrap_or(Span { start: 0, end: 0 });
    meets.fold(first, |hull, span| Span { start: hull.start.min(span.start), end: hull.end.max(span.end) })
}

dispatched! {
    /// Replaces scores by exponentials; zeros for elements that share no window with the query.
    fn exponentials_of_rows(scores: &mut [f32], stride: usize, hulls: &[Span]) = wide exponentials_of_rows_with
}

#[inline(always)]
fn exponentials_of_rows_with<L: Lanes<N>, const N: usize>(scores: &mut [f32], stride: usize, hulls: &[Span]) {
    for (row, hull) in scores.chunks_exact_mut(stride).zip(hulls) {
        exponentials_of_row::<L, N>(row, *hull);
    }
}

#[inline(always)]
fn exponentials_of_row<L: Lanes<N>, const N: usize>(row: &mut [f32], hull: Span) {
    row[..hull.start].fill(0.0);
    row[hull.end..].fill(0.0);
    exponentials::<L, N>(&mut row[hull.start..hull.end]);
}

dispatched! {
    /// Replaces the sums of a query's exponentials by window, in the first half of a row, by `1 / (L Z)`, or by
    /// zeros for windows without the query. `members` tells which windows contain the query; its row stride is also
    /// `width`.
    fn invert_sums(sums: &mut [f32], members: &[f32], width: usize, scales: &[f32], least: &mut [f32]) =
        wide invert_sums_with
}

#[inline(always)]
fn invert_sums_with<L: Lanes<N>, const N: usize>(
    sums: &mut [f32],
    members: &[f32],
    width: usize,
    scales: &[f32],
    least: &mut [f32],
) {
    for (sums, members) in sums.chunks_exact_mut(width).zip(members.chunks_exact(width)) {
        for (((sum, member), scale), least) in sums.iter_mut().zip(members).zip(scales).zip(&mut *least) {
            *least = least.min(if *member > 0.0 { *sum } else { f32::MAX });
            *sum = member * scale / sum.max(f32::MIN_POSITIVE);
        }
    }
}

dispatched! {
    /// Replaces the sums of a query's exponentials by window, and of their products with gradients, by the factors
    /// of members and gradients.
    fn centre_sums(sums: &mut [f32], members: &[f32], width: usize, scales: &[f32]) = wide centre_sums_with
}

#[inline(always)]
fn centre_sums_with<L: Lanes<N>, const N: usize>(
    sums: &mut [f32],
    members: &[f32],
    width: usize,
    scales: &[f32],
) {
    for (sums, members) in sums.chunks_exact_mut(width).zip(members.chunks_exact(width)) {
        let (totals, products) = sums.split_at_mut(width / 2);
        for (((total, product), member), scale) in totals.iter_mut().zip(products).zip(members).zip(scales) {
            let inverse = 1.0 / total.max(f32::MIN_POSITIVE);
            let factor = member * scale * inverse;
            (*total, *product) = (-factor * *product * inverse, factor);
        }
    }
}

dispatched! {
    /// Writes the gradients of the windows that contain an element, and zeros for other windows, to the second half
    /// of the first `n` rows of `by_element`. The row stride of `gradients` is `stride`.
    fn mask(by_element: &mut [f32], width: usize, gradients: &[f32], stride: usize, n: usize) = wide mask_with
}

#[inline(always)]
fn mask_with<L: Lanes<N>, const N: usize>(
    by_element: &mut [f32],
    width: usize,
    gradients: &[f32],
    stride: usize,
    n: usize,
) {
    for (row, gradients) in by_element.chunks_exact_mut(width).zip(gradients.chunks(stride)).take(n) {
        let (members, own) = row.split_at_mut(width / 2);
        for ((own, member), gradient) in own.iter_mut().zip(members).zip(gradients) {
            *own = *member * gradient;
        }
    }
}

dispatched! {
    /// Computes [`Windows::attend`], window by window.
    fn attend_one_by_one(
        scores: &mut [f32], stride: usize, first: usize, hulls: &[Span], spans: &[Span], shares: &mut [f32],
        least: &mut [f32],
    ) = wide attend_one_by_one_with
}

#[inline(always)]
fn attend_one_by_one_with<L: Lanes<N>, const N: usize>(
    scores: &mut [f32],
    stride: usize,
    first: usize,
    hulls: &[Span],
    spans: &[Span],
    shares: &mut [f32],
    least: &mut [f32],
) {
    for (i, (row, hull)) in scores.chunks_exact_mut(stride).zip(hulls).enumerate() {
        exponentials_of_row::<L, N>(row, *hull);
        for (window, span) in spans.iter().enumerate().filter(|(_, span)| span.contains(first + i)) {
            let exponentials = &row[span.start..span.end];
            let total = sum::<L, N>(exponentials);
            least[window] = least[window].min(total);
            let factor = 1.0 / (exponentials.len() as f32 * total.max(f32::MIN_POSITIVE));
            axpy::<L, N>(&mut shares[window * stride..][span.start..span.end], factor, exponentials);
        }
    }
}

/// Replaces each score s by `2^(s - max s)`.
#[inline(always)]
fn exponentials<L: Lanes<N>, const N: usize>(scores: &mut [f32]) {
    let (chunks, rest) = scores.as_chunks_mut::<N>();
    let largest =
        chunks.iter().fold(L::splat(f32::NEG_INFINITY), |largest, chunk| largest.max(L::load(chunk)));
    let largest = rest.iter().copied().fold(largest.largest(), f32::max);
    let shift = L::splat(largest);
    for chunk in chunks {
        L::load(chunk).sub(shift).exp2().store(chunk);
    }
    if !rest.is_empty() {
        let mut padded = [f32::NEG_INFINITY; N];
        padded[..rest.len()].copy_from_slice(rest);
        let powers = L::load(&padded).sub(shift).exp2().to_array();
        rest.copy_from_slice(&powers[..rest.len()]);
    }
}

dispatched! {
    /// Computes [`Windows::score_gradients`], window by window.
    fn gradients_one_by_one(
        scores: &mut [f32], stride: usize, first: usize, hulls: &[Span], spans: &[Span], shares: &mut [f32],
        share_gradients: &[f32], factors: &mut [f32],
    ) = wide gradients_one_by_one_with
}

#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "what a block of queries has")]
fn gradients_one_by_one_with<L: Lanes<N>, const N: usize>(
    scores: &mut [f32],
    stride: usize,
    first: usize,
    hulls: &[Span],
    spans: &[Span],
    shares: &mut [f32],
    share_gradients: &[f32],
    factors: &mut [f32],
) {
    for (i, (row, hull)) in scores.chunks_exact_mut(stride).zip(hulls).enumerate() {
        exponentials_of_row::<L, N>(row, *hull);
        factors[hull.start..hull.end].fill(0.0);
        for (window, span) in spans.iter().enumerate().filter(|(_, span)| span.contains(first + i)) {
            let exponentials = &row[span.start..span.end];
            let gradients = &share_gradients[window * stride..][span.start..span.end];
            let total = sum::<L, N>(exponentials);
            let mean = dot::<L, N>(exponentials, gradients) / total;
            let factor = 1.0 / (exponentials.len() as f32 * total);
            axpy::<L, N>(&mut shares[window * stride..][span.start..span.end], factor, exponentials);
            add_centred::<L, N>(&mut factors[span.start..span.end], factor, gradients, mean);
        }
        multiply::<L, N>(&mut row[hull.start..hull.end], &factors[hull.start..hull.end]);
    }
}

/// Computes `y[i] += a (x[i] - centre)`.
#[inline(always)]
fn add_centred<L: Lanes<N>, const N: usize>(y: &mut [f32], a: f32, x: &[f32], centre: f32) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<N>(), x.as_chunks::<N>());
    let (factor, shift) = (L::splat(a), L::splat(centre));
    for (y, x) in y.iter_mut().zip(x) {
        L::load(y).fma(factor, L::load(x).sub(shift)).store(y);
    }
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y += a * (x - centre));
}

dispatched! {
    fn multiply_all(y: &mut [f32], x: &[f32]) = wide multiply
}

/// Computes `y[i] *= x[i]`.
#[inline(always)]
fn multiply<L: Lanes<N>, const N: usize>(y: &mut [f32], x: &[f32]) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<N>(), x.as_chunks::<N>());
    y.iter_mut().zip(x).for_each(|(y, x)| L::load(y).mul(L::load(x)).store(y));
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y *= x);
}

dispatched! {
    /// Computes `[H, W, n]`: the dot products of every window's upstream gradient with the vectors of the window's
    /// elements.
    fn dots(
        out: &mut [f32], stride: usize, upstream: &[f32], vectors: &[f32], dim: usize, spans: &[Span],
    ) = wide dots_with
}

#[inline(always)]
fn dots_with<L: Lanes<N>, const N: usize>(
    out: &mut [f32],
    stride: usize,
    upstream: &[f32],
    vectors: &[f32],
    dim: usize,
    spans: &[Span],
) {
    let spans = spans.iter().cycle();
    for ((out, upstream), span) in out.chunks_exact_mut(stride).zip(upstream.chunks_exact(dim)).zip(spans) {
        let vectors = vectors[span.start * dim..span.end * dim].chunks_exact(dim);
        for (out, vector) in out[span.start..span.end].iter_mut().zip(vectors) {
            *out = dot::<L, N>(upstream, vector);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::element::Elements;
    use crate::simd::each_copy;

    /// A block of scores of a chain, its windows, and the gradients of their shares.
    #[derive(Debug, Clone)]
    struct Block {
        spans: Vec<Span>,
        first: usize,
        stride: usize,
        scores: Vec<f32>,
        gradients: Vec<f32>,
    }

    fn blocks() -> impl Strategy<Value = Block> {
        let spans = prop::collection::vec((0_usize..40, 1_usize..30), MANY..20);
        (spans, 0_usize..30, 1_usize..30).prop_flat_map(|(spans, first, queries)| {
            let spans: Vec<Span> =
                spans.into_iter().map(|(start, len)| Span { start, end: start + len }).collect();
            let stride = 80;
            let scores = prop::collection::vec(-8.0_f32..8.0, queries * stride);
            let gradients = prop::collection::vec(-2.0_f32..2.0, spans.len() * stride);
            (scores, gradients).prop_map(move |(scores, gradients)| Block {
                spans: spans.clone(),
                first,
                stride,
                scores,
                gradients,
            })
        })
    }

    impl Block {
        fn windows(&self) -> Windows {
            let offsets: Vec<i32> = self.spans.iter().map(|span| span.start as i32).collect();
            let sizes: Vec<i32> = self.spans.iter().map(|span| span.len() as i32).collect();
            let sequence =
                Sequence { table: Elements::Fp32(&[0.0]), rows: &[], offsets: &offsets, sizes: &sizes };
            let chain = Chain { windows: (0..self.spans.len() as u32).collect(), start: 0, end: self.stride };
            let mut windows = Windows::default();
            windows.of(&sequence, &chain, self.stride);
            // With unit vectors, the gradients of shares are the upstream gradients themselves.
            let mut units = vec![0.0; self.stride * self.stride];
            units.iter_mut().step_by(self.stride + 1).for_each(|value| *value = 1.0);
            windows.take_upstream(&self.gradients, &units, self.stride);
            windows.take_head(0);
            windows
        }

        fn zeros(&self) -> Vec<f32> {
            vec![0.0; self.spans.len() * self.stride]
        }
    }

    /// Computes by slices: the forward shares, the backward shares, and the gradients of the scores.
    fn by_slices(block: &Block) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let Block { spans, first, stride, gradients, .. } = block;
        let (mut scores, mut shares) = (block.scores.clone(), block.zeros());
        let mut least = vec![f32::MAX; spans.len()];
        let hulls: Vec<Span> = (0..*stride).map(|query| hull(spans, query)).collect();
        let hulls = &hulls[*first..];
        attend_one_by_one(&mut scores, *stride, *first, hulls, spans, &mut shares, &mut least);
        assert!(least.iter().all(|least| *least > SMALLEST_SUM));
        let (mut scores, mut again) = (block.scores.clone(), block.zeros());
        let mut factors = vec![0.0; *stride];
        gradients_one_by_one(&mut scores, *stride, *first, hulls, spans, &mut again, gradients, &mut factors);
        (shares, again, scores)
    }

    fn close(found: &[f32], expected: &[f32]) -> bool {
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5 * (1.0 + b.abs());
        found.len() == expected.len() && found.iter().zip(expected).all(near)
    }

    proptest! {
        #[test]
        fn matrices_give_what_slices_give(block in blocks()) {
            let mut windows = block.windows();
            prop_assert!(windows.columns > 0);
            let (mut scores, mut shares) = (block.scores.clone(), block.zeros());
            windows.attend(&mut scores, block.first, &mut shares);
            windows.clear_outside(&mut shares);
            let (mut scores, mut again) = (block.scores.clone(), block.zeros());
            windows.score_gradients(&mut scores, block.first, &mut again);
            windows.clear_outside(&mut again);
            let mut of_slices = Vec::new();
            each_copy(|| of_slices.push(by_slices(&block)));
            for (expected_shares, expected_again, expected_scores) in &of_slices {
                prop_assert!(close(&shares, expected_shares));
                prop_assert!(close(&again, expected_again));
                prop_assert!(close(&scores, expected_scores));
            }
        }
    }
}
