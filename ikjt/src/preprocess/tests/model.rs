//! The naive model for the tests: applies each step to one sample at a time, as the documentation defines it.

use std::collections::BTreeMap;

use super::super::sampling::Draws;
use crate::batch::Batch;
use crate::hash::{mix, sigrid_hash};

type List = Vec<i64>;

#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) ordinal: u64,
    pub(super) lists: BTreeMap<String, List>,
    pub(super) dense: BTreeMap<String, f32>,
    pub(super) label: f32,
    pub(super) weight: Option<f32>,
    pub(super) time: i64,
}

#[derive(Debug, Clone)]
pub(super) enum ModelOp {
    SigridHash(u64, i64),
    PositiveModulus(i64),
    ClampIds(i64, i64),
    MapId(Vec<i64>),
    FirstX(usize),
    LastX(usize),
    NgramConcat(usize),
    NgramHash(usize, u64),
    Enumerate(i64),
    FillList(i64),
    ClampDense(f32, f32),
    Logit(f32),
    BoxCox(f32),
    Log1p,
    FillDense(f32),
    Bucketize(Vec<f32>, bool),
    OneHot(f32, f32, i64),
    LocalHour,
    Cartesian(u64, i64),
    Intersect,
    OverlapCount,
    Jaccard,
    Sampling(Vec<(f32, f64)>, u64, bool),
    SamplingAll(f64, u64, bool),
}

#[derive(Debug, Clone)]
pub(super) struct ModelStep {
    pub(super) op: ModelOp,
    pub(super) inputs: Vec<String>,
    pub(super) output: Option<String>,
}

use ModelOp::*;

impl ModelStep {
    /// Returns the step in TOML.
    pub(super) fn toml(&self) -> String {
        let keys = match &self.op {
            SigridHash(salt, max) => format!("op = 'sigrid_hash'\nsalt = {salt}\nmax = {max}"),
            PositiveModulus(modulus) => format!("op = 'positive_modulus'\nmodulus = {modulus}"),
            ClampIds(min, max) => format!("op = 'clamp'\nmin = {min}\nmax = {max}"),
            MapId(table) => format!("op = 'map_id'\ntable = {table:?}"),
            FirstX(count) => format!("op = 'firstx'\ncount = {count}"),
            LastX(count) => format!("op = 'lastx'\ncount = {count}"),
            NgramConcat(n) => format!("op = 'ngram'\nn = {n}"),
            NgramHash(n, salt) => format!("op = 'ngram'\nn = {n}\ncombine = 'hash'\nsalt = {salt}"),
            Enumerate(start) => format!("op = 'enumerate'\nstart = {start}"),
            FillList(value) => format!("op = 'fill_null'\nvalue = {value}"),
            ClampDense(min, max) => format!("op = 'clamp'\nmin = {min:?}\nmax = {max:?}"),
            Logit(epsilon) => format!("op = 'logit'\nepsilon = {epsilon:?}"),
            BoxCox(lambda) => format!("op = 'boxcox'\nlambda = {lambda:?}"),
            Log1p => "op = 'log1p'".to_owned(),
            FillDense(value) => format!("op = 'fill_null'\nvalue = {value:?}"),
            Bucketize(borders, left) => {
                let edges = if *left { "left" } else { "right" };
                format!("op = 'bucketize'\nborders = {borders:?}\nedges = '{edges}'")
            }
            OneHot(low, high, n) => format!("op = 'onehot'\nlow = {low:?}\nhigh = {high:?}\nbuckets = {n}"),
            LocalHour => "op = 'get_local_hour'\nzone = 'Asia/Kolkata'".to_owned(),
            Cartesian(salt, max) => format!("op = 'cartesian'\nsalt = {salt}\nmax = {max}"),
            Intersect => "op = 'id_list_intersect'".to_owned(),
            OverlapCount => "op = 'compute_score'\nscore = 'overlap_count'".to_owned(),
            Jaccard => "op = 'compute_score'\nscore = 'jaccard'".to_owned(),
            Sampling(keep, seed, correct) => {
                let keep: Vec<_> = keep.iter().map(|(label, rate)| format!("'{label}' = {rate:?}")).collect();
                let keep = keep.join(", ");
                format!(
                    "op = 'sampling'\nlabel = 'clicked'\nkeep = {{ {keep} }}\nseed = {seed}\ncorrect_weights = {correct}"
                )
            }
            SamplingAll(rate, seed, correct) => {
                format!("op = 'sampling'\nrate = {rate:?}\nseed = {seed}\ncorrect_weights = {correct}")
            }
        };
        let inputs =
            if self.inputs.is_empty() { String::new() } else { format!("inputs = {:?}\n", self.inputs) };
        let output = self.output.iter().map(|name| format!("output = '{name}'\n")).collect::<String>();
        format!("[[step]]\n{keys}\n{inputs}{output}")
    }

    /// Applies the step to every sample in an epoch. `number` is the number of sampling steps before it.
    pub(super) fn apply(&self, samples: &mut Vec<Sample>, number: u64, epoch: u64) {
        match &self.op {
            Sampling(keep, seed, correct) => {
                let rate = |sample: &Sample| {
                    keep.iter().find(|(label, _)| *label == sample.label).map_or(1.0, |(_, rate)| *rate)
                };
                sample_down(samples, Draws::new(*seed, number).of_epoch(epoch), rate, *correct);
            }
            SamplingAll(rate, seed, correct) => {
                sample_down(samples, Draws::new(*seed, number).of_epoch(epoch), |_| *rate, *correct);
            }
            _ => samples.iter_mut().for_each(|sample| self.apply_to(sample)),
        }
    }

    fn apply_to(&self, sample: &mut Sample) {
        let output = |input: &String| self.output.clone().unwrap_or_else(|| input.clone());
        match (&self.op, &self.inputs[..]) {
            (LocalHour, []) => {
                // India has been 5.5 hours ahead of UTC since 1945.
                let hour = (sample.time / 1_000_000 + 19_800) / 3600 % 24;
                sample.lists.insert(output(&String::new()), vec![hour]);
            }
            (Cartesian(..) | Intersect, [a, b]) => {
                let list = list_of_two(&self.op, &sample.lists[a], &sample.lists[b]);
                sample.lists.insert(output(a), list);
            }
            (OverlapCount | Jaccard, [a, b]) => {
                let score = score(&self.op, &sample.lists[a], &sample.lists[b]);
                sample.dense.insert(output(a), score);
            }
            (op, inputs) => {
                for input in inputs {
                    match sample.lists.get(input) {
                        Some(list) => drop(sample.lists.insert(output(input), list_of(op, list))),
                        None => match id_of(op, sample.dense[input]) {
                            Some(id) => drop(sample.lists.insert(output(input), vec![id])),
                            None => {
                                let x = number_of(op, sample.dense[input]);
                                sample.dense.insert(output(input), x);
                            }
                        },
                    }
                }
            }
        }
    }
}

fn sample_down(samples: &mut Vec<Sample>, draws: Draws, rate: impl Fn(&Sample) -> f64, correct: bool) {
    samples.retain(|sample| draws.draw(sample.ordinal) < rate(sample));
    for sample in samples.iter_mut().filter(|_| correct) {
        sample.weight = Some((f64::from(sample.weight.unwrap_or(1.0)) / rate(sample)) as f32);
    }
}

fn list_of(op: &ModelOp, list: &[i64]) -> List {
    let each = |f: &dyn Fn(i64) -> i64| list.iter().map(|id| f(*id)).collect::<List>();
    match op {
        SigridHash(salt, max) => each(&|id| sigrid_hash(id, *salt, *max)),
        PositiveModulus(modulus) => each(&|id| id.rem_euclid(*modulus)),
        ClampIds(min, max) => each(&|id| id.clamp(*min, *max)),
        MapId(table) => each(&|id| if id < 0 { 0 } else { table[id as usize % table.len()] }),
        FirstX(count) => list.iter().take(*count).copied().collect(),
        LastX(count) => list[list.len().saturating_sub(*count)..].to_vec(),
        NgramConcat(n) => list.windows(*n).flatten().copied().collect(),
        NgramHash(n, salt) => {
            let hash = |window: &[i64]| window.iter().fold(*salt, |state, id| mix(*id, state)) >> 1;
            list.windows(*n).map(|window| hash(window) as i64).collect()
        }
        Enumerate(start) => (0..list.len()).map(|place| start + place as i64).collect(),
        FillList(value) if list.is_empty() => vec![*value],
        FillList(_) => list.to_vec(),
        op => panic!("{op:?} is not for lists"),
    }
}

fn list_of_two(op: &ModelOp, a: &[i64], b: &[i64]) -> List {
    match op {
        Cartesian(salt, max) => {
            let pairs = a.iter().flat_map(|x| b.iter().map(move |y| (*x, *y)));
            pairs.map(|(x, y)| sigrid_hash(y, mix(x, *salt), *max)).collect()
        }
        _ => {
            let first = |i: &usize| b.contains(&a[*i]) && !a[..*i].contains(&a[*i]);
            (0..a.len()).filter(first).map(|i| a[i]).collect()
        }
    }
}

fn score(op: &ModelOp, a: &[i64], b: &[i64]) -> f32 {
    let set = |ids: &[i64]| ids.iter().copied().collect::<std::collections::BTreeSet<_>>();
    let (a, b) = (set(a), set(b));
    let (common, all) = (a.intersection(&b).count(), a.union(&b).count());
    match op {
        OverlapCount => common as f32,
        _ if all == 0 => 0.0,
        _ => (common as f64 / all as f64) as f32,
    }
}

fn id_of(op: &ModelOp, x: f32) -> Option<i64> {
    match op {
        Bucketize(borders, left) => {
            let below = |border: &&f32| if *left { **border <= x } else { **border < x };
            Some(borders.iter().filter(below).count() as i64)
        }
        OneHot(low, high, n) => {
            let place = ((x - low) / ((high - low) / *n as f32)).trunc();
            Some(if place >= 0.0 && place < *n as f32 { place as i64 } else { 0 })
        }
        _ => None,
    }
}

fn number_of(op: &ModelOp, x: f32) -> f32 {
    match op {
        ClampDense(min, max) if !x.is_nan() => x.max(*min).min(*max),
        ClampDense(..) => x,
        Logit(epsilon) if !x.is_nan() => {
            let y = x.max(*epsilon).min(1.0 - epsilon);
            (y / (1.0 - y)).ln()
        }
        Logit(_) => x,
        BoxCox(_) if x <= 0.0 => x,
        BoxCox(0.0) => x.ln(),
        BoxCox(lambda) => (x.powf(*lambda) - 1.0) / lambda,
        Log1p => x.ln_1p(),
        FillDense(value) if x.is_nan() => *value,
        FillDense(_) => x,
        op => panic!("{op:?} is not for dense features"),
    }
}

/// Returns the samples of a batch with the dense features `dense`. The first sample has index `start` in the dataset.
pub(super) fn samples_of(batch: &Batch, dense: &[String], start: u64) -> Vec<Sample> {
    let sample = |i: usize| {
        let lists = batch.groups().iter().flat_map(|group| {
            let row = group.row_of(i);
            group.features().iter().map(move |feature| (feature.name().to_owned(), feature.row(row).to_vec()))
        });
        let numbers = &batch.dense()[i * dense.len()..][..dense.len()];
        Sample {
            ordinal: start + i as u64,
            lists: lists.collect(),
            dense: dense.iter().cloned().zip(numbers.iter().copied()).collect(),
            label: batch.labels()[i],
            weight: batch.weights().map(|weights| weights[i]),
            time: batch.timestamps().map_or(0, |times| times[i]),
        }
    };
    (0..batch.size()).map(sample).collect()
}

/// Asserts that samples are equal except for their index in the epoch. Floats are compared bit by bit.
pub(super) fn assert_same(found: &[Sample], expected: &[Sample]) {
    assert_eq!(found.len(), expected.len(), "samples");
    // Like `to_bits`, but all NaNs are equal.
    let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.lists, expected.lists);
        let dense = |sample: &Sample| -> Vec<(String, u32)> {
            sample.dense.iter().map(|(name, x)| (name.clone(), bits(*x))).collect()
        };
        assert_eq!(dense(found), dense(expected), "{:?} {:?}", found.dense, expected.dense);
        let rest = |sample: &Sample| (bits(sample.label), sample.weight.map(bits), sample.time);
        assert_eq!(rest(found), rest(expected));
    }
}
