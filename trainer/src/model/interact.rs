//! From the vectors of a batch to what the top MLP goes on from, and back.
//!
//! Dot products and the top MLP's first layer, which is linear in them, run once per row of each of the batch's
//! [`levels`]; the sums of the layer go from level to level, so that what arrives at the samples is whole:
//!
//! ```text
//! sums of level l, [U_l, H] = sums of level l-1 of each row's parent + products of level l, [U_l, P_l] × Wᵀ of these products
//! ```
//!
//! Going back, the gradient of the sums is summed over the rows of each parent in the same way. Cross layers
//! take all vectors side by side and have one level.

use rayon::prelude::*;
use tch::{Tensor, nn};

use super::levels::{Joinable, Level, levels};
use super::{Model, Stage};
use crate::kernels::interaction::{Form, Interaction, Source};
use crate::tensors;

/// The result, and what its backward needs.
#[derive(Debug)]
pub(super) struct Interacted {
    /// The leaf: the first layer's sums with its bias, `[B, H]`; with cross layers all vectors, `[B, N D]`.
    pub(super) leaf: Tensor,
    parts: Vec<Part>,
}

/// The products of one level.
#[derive(Debug)]
struct Part {
    level: Level,
    /// `[U, P]`.
    products: Tensor,
    /// The columns of the first layer's weights that belong to them, in the order of the products.
    columns: Vec<usize>,
    /// These columns, `[H, P]`.
    weights: Tensor,
}

impl Interacted {
    /// Nothing.
    pub(super) fn none() -> Self {
        Self { leaf: Tensor::new(), parts: Vec::new() }
    }

    /// Products of pairs of vectors and kept values that were computed, each counted once however many samples share it.
    pub(super) fn products(&self) -> u64 {
        self.parts.iter().map(|part| part.products.numel() as u64).sum()
    }
}

impl Model {
    /// The interaction of a batch of `size` samples.
    pub(super) fn interact(&self, sources: &[Source<'_>], size: usize) -> Interacted {
        if self.crosses.is_some() {
            let leaf = self.profile.measure(Stage::Interaction, || {
                let interaction = Interaction { sources, dim: self.embeddings.dim(), form: Form::Concat };
                self.products(&interaction, size)
            });
            return Interacted { leaf: leaf.set_requires_grad(true), parts: Vec::new() };
        }
        let levels = self.profile.measure(Stage::Interaction, || {
            let dim = self.embeddings.dim();
            let joinable = sources.iter().map(|source| Joinable {
                vectors: source.vectors,
                inverse: source.inverse.map(|inverse| (source.rows(dim), inverse)),
            });
            levels(&joinable.collect::<Vec<_>>(), size, self.steps.interactions)
        });
        let first = self.top.first();
        let weights = first.ws.detach().contiguous();
        let mut sums = bias(first).detach();
        let mut parts = Vec::with_capacity(levels.len());
        for level in levels {
            let products = self.profile.measure(Stage::Interaction, || {
                let sources = sources_of(&level, sources);
                let interaction = self.dot(&level, &sources);
                self.products(&interaction, level.rows)
            });
            self.profile.measure(Stage::FirstLayer, || {
                let columns = self.columns(&level, sources);
                let part = self.gather_columns(&weights, &columns);
                if parts.is_empty() {
                    sums = sums.addmm(&products, &part.tr());
                } else {
                    sums = self.expand_rows(&sums, &level.parent);
                    let _ = sums.addmm_(&products, &part.tr());
                }
                parts.push(Part { level, products, columns, weights: part });
            });
        }
        Interacted { leaf: sums.set_requires_grad(true), parts }
    }

    /// The gradients of every source's rows; those of the first layer's parameters are added to theirs. To be called when
    /// `backward` has reached the leaf.
    pub(super) fn interact_backward(&self, forward: &Interacted, sources: &[Source<'_>]) -> Vec<Vec<f32>> {
        let mut upstream = forward.leaf.grad().contiguous();
        if self.crosses.is_some() {
            let interaction = Interaction { sources, dim: self.embeddings.dim(), form: Form::Concat };
            return self.products_backward(&interaction, &upstream);
        }
        let first = self.top.first();
        let mut weight_gradient = None;
        self.profile.measure(Stage::FirstLayerBackward, || {
            add_gradient(bias(first), &upstream.sum_dim_intlist([0_i64].as_slice(), false, tch::Kind::Float));
        });
        let mut gradients: Vec<Vec<f32>> = sources.iter().map(|_| Vec::new()).collect();
        for (number, part) in forward.parts.iter().enumerate().rev() {
            let of_products = self.profile.measure(Stage::FirstLayerBackward, || {
                let of_weights = upstream.tr().matmul(&part.products);
                self.scatter_columns(of_weights, &part.columns, &first.ws.size(), &mut weight_gradient);
                upstream.matmul(&part.weights)
            });
            let level_sources = sources_of(&part.level, sources);
            let interaction = self.dot(&part.level, &level_sources);
            let of_sources = self.products_backward(&interaction, &of_products);
            for ((source, _), gradient) in part.level.sources.iter().zip(of_sources) {
                add(&mut gradients[*source], gradient);
            }
            if let Some(before) = number.checked_sub(1) {
                upstream = self.profile.measure(Stage::FirstLayerBackward, || {
                    self.fold_rows(&upstream, &part.level.parent, forward.parts[before].level.rows)
                });
            }
        }
        if let Some(gradient) = &weight_gradient {
            self.profile.measure(Stage::FirstLayerBackward, || add_gradient(&first.ws, gradient));
        }
        gradients
    }

    /// The products of a level's new vectors with each other and with those before.
    fn dot<'a>(&self, level: &Level, sources: &'a [Source<'a>]) -> Interaction<'a> {
        let vectors: usize = sources.iter().map(|source| source.vectors).sum();
        // The bottom MLP's output, whose values stand beside the products, is the first source of all.
        let bottom =
            self.bottom.as_ref().and_then(|_| level.sources.iter().position(|(source, _)| *source == 0));
        let before = |place: usize| sources[..place].iter().map(|source| source.vectors).sum::<usize>();
        let keeps = bottom.map(before).filter(|place| (level.taken..vectors).contains(place));
        Interaction { sources, dim: self.embeddings.dim(), form: Form::Dot { keeps, taken: level.taken } }
    }

    /// Which columns of the first layer a level's products are: they have the order of the strict lower triangle of all
    /// vectors in the order of `sources`, after the bottom MLP's output.
    fn columns(&self, level: &Level, sources: &[Source<'_>]) -> Vec<usize> {
        let kept = if self.bottom.is_some() { self.embeddings.dim() } else { 0 };
        let begins: Vec<usize> = sources
            .iter()
            .scan(0, |next, source| {
                *next += source.vectors;
                Some(*next - source.vectors)
            })
            .collect();
        let vectors: Vec<usize> = level
            .sources
            .iter()
            .flat_map(|(source, _)| begins[*source]..begins[*source] + sources[*source].vectors)
            .collect();
        let keeps_bottom = kept > 0 && vectors[level.taken..].contains(&0);
        let mut columns: Vec<usize> = (0..if keeps_bottom { kept } else { 0 }).collect();
        for (place, &one) in vectors.iter().enumerate().skip(level.taken) {
            columns.extend(vectors[..place].iter().map(|&other| {
                let (row, column) = (one.max(other), one.min(other));
                kept + row * (row - 1) / 2 + column
            }));
        }
        columns
    }

    fn products(&self, interaction: &Interaction<'_>, rows: usize) -> Tensor {
        let shape = [rows as i64, interaction.width() as i64];
        tensors::written(&shape, |output| self.embeddings.install(|| interaction.forward_into(output)))
    }

    fn products_backward(&self, interaction: &Interaction<'_>, gradient: &Tensor) -> Vec<Vec<f32>> {
        let gradient = tensors::as_slice(gradient);
        self.profile.measure(Stage::InteractionBackward, || {
            self.embeddings.install(|| interaction.backward(gradient))
        })
    }

    /// `columns` of a matrix.
    fn gather_columns(&self, matrix: &Tensor, columns: &[usize]) -> Tensor {
        let (height, width) = shape(matrix);
        if are_all(columns, width) {
            return matrix.shallow_clone();
        }
        let (values, chosen) = (tensors::as_slice(matrix), columns.len().max(1));
        tensors::filled(&[height as i64, columns.len() as i64], |gathered| {
            self.embeddings.install(|| {
                gathered.par_chunks_exact_mut(chosen).zip(values.par_chunks_exact(width)).for_each(
                    |(gathered, row)| {
                        gathered.iter_mut().zip(columns).for_each(|(value, &column)| *value = row[column]);
                    },
                );
            });
        })
    }

    /// Writes `values` where [`gather_columns`](Self::gather_columns) read, into a matrix that is made the first time.
    fn scatter_columns(&self, values: Tensor, columns: &[usize], size: &[i64], matrix: &mut Option<Tensor>) {
        let width = size[1] as usize;
        if are_all(columns, width) {
            *matrix = Some(values);
            return;
        }
        let matrix = matrix.get_or_insert_with(|| tensors::filled(size, |_| ()));
        let values = values.contiguous();
        let (values, chosen) = (tensors::as_slice(&values), columns.len().max(1));
        tensors::with_mut_slice(matrix, |matrix| {
            self.embeddings.install(|| {
                matrix.par_chunks_exact_mut(width).zip(values.par_chunks_exact(chosen)).for_each(
                    |(row, values)| {
                        values.iter().zip(columns).for_each(|(value, &column)| row[column] = *value);
                    },
                );
            });
        });
    }

    fn expand_rows(&self, rows: &Tensor, parent: &[i32]) -> Tensor {
        let (_, width) = shape(rows);
        tensors::filled(&[parent.len() as i64, width as i64], |expanded| {
            self.embeddings.expand(tensors::as_slice(rows), width, parent, expanded);
        })
    }

    fn fold_rows(&self, gradient: &Tensor, parent: &[i32], rows: usize) -> Tensor {
        let (_, width) = shape(gradient);
        tensors::filled(&[rows as i64, width as i64], |folded| {
            self.embeddings.fold(tensors::as_slice(gradient), width, parent, folded);
        })
    }
}

/// Whether these are all columns of a matrix of this width, in their order.
fn are_all(columns: &[usize], width: usize) -> bool {
    columns.len() == width && columns.iter().enumerate().all(|(place, column)| place == *column)
}

fn shape(matrix: &Tensor) -> (usize, usize) {
    let size = matrix.size();
    (size[0] as usize, size[1] as usize)
}

fn bias(layer: &nn::Linear) -> &Tensor {
    layer.bs.as_ref().expect("a layer of `LinearConfig::default()` has a bias")
}

/// A level's sources, each with the rows that the level's rows have.
fn sources_of<'a>(level: &'a Level, sources: &[Source<'a>]) -> Vec<Source<'a>> {
    let source = |(source, rows): &'a (usize, Option<Vec<i32>>)| Source {
        inverse: rows.as_deref(),
        ..sources[*source]
    };
    level.sources.iter().map(source).collect()
}

/// Adds to the gradient of a parameter that autograd has not seen.
fn add_gradient(parameter: &Tensor, gradient: &Tensor) {
    if parameter.grad().defined() {
        let _ = tch::no_grad(|| parameter.grad().g_add_(gradient));
    } else {
        (parameter * gradient).sum(tch::Kind::Float).backward();
    }
}

fn add(total: &mut Vec<f32>, values: Vec<f32>) {
    if total.is_empty() {
        *total = values;
    } else {
        total.iter_mut().zip(&values).for_each(|(total, value)| *total += value);
    }
}
