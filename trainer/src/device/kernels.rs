//! Launches of the kernels of `kernels.cu`, except those of the update.
//!
//! The functions check the shapes, types and devices of tensors. The contents of index tensors were checked when
//! they were created: rows and inverse indices by `Batch::try_new`, ids when they were staged.

use tch::{Kind, Tensor};

use super::weights::Weights;
use super::{Accelerator, Argument};
use crate::Result;

/// Rows of values that may overlap: row r contains the elements `offsets[r] .. offsets[r] + sizes[r]`.
#[derive(Debug)]
pub(crate) struct Jagged {
    /// The number of rows.
    pub(crate) rows: i64,
    /// The first element of each row, `[rows]`.
    pub(crate) offsets: Tensor,
    /// The number of elements of each row, `[rows]`.
    pub(crate) sizes: Tensor,
    /// The rows that are not empty, ordered by offset.
    pub(crate) order: Tensor,
    /// For each position in `order`, the largest end of the rows up to it.
    pub(crate) reach: Tensor,
    /// The number of elements of the longest row, at least 1.
    pub(crate) longest: i64,
}

/// Rows that are pooled.
#[derive(Debug)]
pub(crate) struct Bags {
    /// The bags, as rows of elements.
    pub(crate) jagged: Jagged,
    /// The factor of each sum, `[rows]`.
    pub(crate) scales: Tensor,
}

/// The samples of every row, over which sums are computed.
#[derive(Debug)]
pub(crate) struct Sums {
    /// The samples, ordered by row, `[B]`.
    pub(crate) order: Tensor,
    /// The end of each row's samples in `order`, `[U]`.
    pub(crate) ends: Tensor,
}

pub(super) fn check(tensor: &Tensor, kind: Kind, length: i64, what: &str) {
    assert!(
        tensor.kind() == kind && tensor.is_contiguous(),
        "{what}: a contiguous tensor of {kind:?} is needed"
    );
    assert!(tensor.numel() as i64 >= length, "{what}: {} of {length} values", tensor.numel());
}

impl Jagged {
    fn check(&self) {
        check(&self.offsets, Kind::Int, self.rows, "offsets");
        check(&self.sizes, Kind::Int, self.rows, "sizes");
        check(&self.reach, Kind::Int, self.order.numel() as i64, "reach");
        check(&self.order, Kind::Int, 0, "order");
    }
}

impl Accelerator {
    /// Returns for each of `elements` elements the first position in the rows' order whose row may contain it.
    fn first_rows(&self, rows: &Jagged, elements: i64) -> Result<Tensor> {
        let firsts = self.empty(&[elements], Kind::Int)?;
        let arguments = arguments![&rows.reach, rows.order.numel() as i64, elements, &firsts];
        // SAFETY: the arguments match `first_rows`; callers have checked that `reach` is as long as `order`.
        unsafe { self.launch("first_rows", elements, &arguments) }?;
        Ok(firsts)
    }

    /// Enqueues a kernel, unless `threads` is 0.
    ///
    /// # Panics
    ///
    /// If a tensor is on another device.
    ///
    /// # Safety
    ///
    /// The arguments match the kernel's parameters in order and type, tensors have the element types that it reads
    /// and writes, and no thread accesses memory outside of them, neither by its thread index nor by an index that
    /// it reads.
    pub(super) unsafe fn launch(
        &self,
        kernel: &'static str,
        threads: i64,
        arguments: &[Argument<'_>],
    ) -> Result<()> {
        let here = |tensor: &Tensor| tensor.device() == self.torch();
        let mut tensors = arguments.iter().filter_map(|argument| match argument {
            Argument::Pointer(tensor) => *tensor,
            _ => None,
        });
        assert!(tensors.all(here), "`{kernel}`: a tensor is elsewhere");
        if threads == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees what the driver requires.
        unsafe { self.driver.launch(kernel, threads, arguments) }
    }

    /// Returns the table row of every id. `starts` contains the first id of each feature, `tables` three numbers
    /// per feature (see the kernel).
    pub(super) fn table_rows(&self, ids: &Tensor, starts: &Tensor, tables: &Tensor) -> Result<Tensor> {
        let (count, features) = (ids.numel() as i64, starts.numel() as i64);
        check(ids, Kind::Int64, count, "ids");
        check(starts, Kind::Int64, features, "starts");
        check(tables, Kind::Int64, 3 * features, "tables");
        let rows = self.empty(&[count], Kind::Int)?;
        let arguments = arguments![ids, count, starts, tables, features as i32, &rows];
        // SAFETY: the arguments match `table_rows`, their lengths were checked, and there is a thread for each id.
        unsafe { self.launch("table_rows", count, &arguments) }?;
        Ok(rows)
    }

    /// Returns the weights of table rows as 32-bit floats, `[rows, D]`; zeros for row -1.
    pub(super) fn gather(&self, weights: &Weights, rows: &Tensor) -> Result<Tensor> {
        let (dim, count) = (weights.dim, rows.numel() as i64);
        check(rows, Kind::Int, count, "rows");
        let output = self.empty(&[count, dim], Kind::Float)?;
        let own = arguments![dim as i32, rows, count, &output];
        let arguments = [&weights.arguments()[..], &own].concat();
        // SAFETY: the arguments match `gather`, their lengths were checked, and `rows` are rows of the tables or
        // -1, because `table_rows` computes them from ids that were checked when they were staged.
        unsafe { self.launch("gather", count * dim, &arguments) }?;
        Ok(output)
    }

    /// Pools the weights of the elements of each bag, `[bags, D]`.
    pub(super) fn pool(&self, weights: &Weights, rows: &Tensor, bags: &Bags) -> Result<Tensor> {
        let (dim, count) = (weights.dim, bags.jagged.rows);
        check(rows, Kind::Int, 0, "rows");
        bags.check();
        let output = self.empty(&[count, dim], Kind::Float)?;
        let Jagged { offsets, sizes, .. } = &bags.jagged;
        let own = arguments![dim as i32, rows, offsets, sizes, &bags.scales, count, &output];
        let arguments = [&weights.arguments()[..], &own].concat();
        // SAFETY: the arguments match `pool`, and `check` has checked the lengths of the bags' tensors. Bags end within
        // `rows`, because both were staged together. Pooled `rows` are rows of the tables (see `gather`), never -1,
        // because features that other ranks pool have no elements.
        unsafe { self.launch("pool", count * dim, &arguments) }?;
        Ok(output)
    }

    /// Returns the gradient of each of `elements` elements, `[elements, D]`, given the gradient of the bags,
    /// `[bags, D]`.
    pub(super) fn unpool(&self, gradient: &Tensor, bags: &Bags, elements: i64) -> Result<Tensor> {
        let dim = gradient.size()[1];
        check(gradient, Kind::Float, bags.jagged.rows * dim, "gradient");
        bags.check();
        let (output, firsts) =
            (self.empty(&[elements, dim], Kind::Float)?, self.first_rows(&bags.jagged, elements)?);
        let (Jagged { offsets, sizes, order, .. }, scales) = (&bags.jagged, &bags.scales);
        let (dim, rows) = (dim as i32, order.numel() as i64);
        let arguments =
            arguments![gradient, dim, offsets, sizes, scales, order, &firsts, rows, elements, &output];
        // SAFETY: the arguments match `unpool`, their lengths were checked, and `order` contains indices of bags,
        // because both were staged together.
        unsafe { self.launch("unpool", output.numel() as i64, &arguments) }?;
        Ok(output)
    }

    /// Copies row `index[r]` of `values`, `[U, width]`, to row r of `output`, which is a matrix or some columns of
    /// a matrix. Without an index, copies row r.
    pub(crate) fn expand(&self, values: &Tensor, index: Option<&Tensor>, output: &Tensor) -> Result<()> {
        let (count, width) = (output.size()[0], output.size()[1]);
        check(values, Kind::Float, if index.is_none() { count * width } else { 0 }, "values");
        assert!(values.numel() == 0 || values.size()[1] == width, "rows have another width");
        if let Some(index) = index {
            check(index, Kind::Int, count, "index");
        }
        let arguments = arguments![values, index, count, width, output, columns_stride(output)];
        // SAFETY: the arguments match `expand`; lengths and strides were checked. `Batch::try_new` has checked that
        // an inverse index contains only indices of rows.
        unsafe { self.launch("expand", count * width, &arguments) }
    }

    /// Computes the backward pass of [`expand`](Self::expand): writes `[U, width]` to `output`, given `values`,
    /// which is a matrix or some columns of a matrix.
    pub(crate) fn fold(&self, values: &Tensor, sums: Option<&Sums>, output: &Tensor) -> Result<()> {
        let (rows, width) = (output.size()[0], output.size()[1]);
        check(output, Kind::Float, rows * width, "sums");
        assert!(values.size()[1] == width, "rows have another width");
        match sums {
            None => assert!(values.size()[0] == rows, "samples are no rows"),
            Some(sums) => {
                check(&sums.order, Kind::Int, 0, "order");
                check(&sums.ends, Kind::Int, rows, "ends");
            }
        }
        let (order, ends) = (sums.map(|sums| &sums.order), sums.map(|sums| &sums.ends));
        let arguments = arguments![values, columns_stride(values), order, ends, rows, width, output];
        // SAFETY: the arguments match `fold`; lengths and strides were checked. `order` contains rows of `values`,
        // and `ends` are ascending positions in it: `SamplesOfRows` computes both from an inverse index, `Merged`
        // from keys.
        unsafe { self.launch("fold", rows * width, &arguments) }
    }

    /// Pads the rows of `values`, `[elements, width]`, to `[rows, longest, width]`.
    pub(crate) fn pad(&self, values: &Tensor, rows: &Jagged) -> Result<Tensor> {
        let (width, longest) = (values.size()[1], rows.longest);
        check(values, Kind::Float, 0, "values");
        rows.check();
        let output = self.empty(&[rows.rows, longest, width], Kind::Float)?;
        let Jagged { offsets, sizes, rows: count, .. } = rows;
        let arguments = arguments![values, width, offsets, sizes, *count, longest, &output];
        // SAFETY: the arguments match `pad`, and `check` has checked their lengths. Rows end within `values`,
        // because both were staged together.
        unsafe { self.launch("pad", rows.rows * longest * width, &arguments) }?;
        Ok(output)
    }

    /// Computes the backward pass of [`pad`](Self::pad): `[elements, width]` from `[rows, longest, width]`.
    pub(crate) fn unpad(&self, gradient: &Tensor, rows: &Jagged, elements: i64) -> Result<Tensor> {
        let (width, longest) = (gradient.size()[2], rows.longest);
        check(gradient, Kind::Float, rows.rows * longest * width, "gradient");
        rows.check();
        let (output, firsts) =
            (self.empty(&[elements, width], Kind::Float)?, self.first_rows(rows, elements)?);
        let Jagged { offsets, sizes, order, .. } = rows;
        let count = order.numel() as i64;
        let arguments =
            arguments![gradient, width, offsets, sizes, order, &firsts, count, longest, elements, &output];
        // SAFETY: the arguments match `unpad`, their lengths were checked, and `order` contains indices of rows,
        // none of which is longer than `longest`: they were staged together.
        unsafe { self.launch("unpad", elements * width, &arguments) }?;
        Ok(output)
    }
}

impl Bags {
    fn check(&self) {
        self.jagged.check();
        check(&self.scales, Kind::Float, self.jagged.rows, "scales");
    }
}

/// Returns the row stride, in floats, of a matrix or of some columns of a matrix.
fn columns_stride(matrix: &Tensor) -> i64 {
    let strides = matrix.stride();
    assert!(matrix.kind() == Kind::Float && matrix.dim() == 2, "a matrix of floats is needed");
    assert!(strides[1] == 1 || matrix.size()[1] <= 1, "columns must stand together");
    strides[0]
}
