//! Compares random pipelines on random batches with the naive [`model`].

mod model;

use std::path::Path;

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use proptest::prelude::*;

use self::model::{ModelOp, ModelStep, assert_same, samples_of};
use super::{PreprocessConfig, Preprocessor};
use crate::batch::{Batch, BatchParts, Feature, Group};

pub(super) fn schema(groups: &[(&str, &[&str])], weight: bool) -> Schema {
    let feature = |name: &&str| SparseFeature::new(*name, SparseKind::Sparse);
    let group = |(name, features): &(&str, &[&str])| FeatureGroup {
        name: (*name).to_owned(),
        deduplicated: true,
        features: features.iter().map(feature).collect(),
    };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: weight.then(|| "importance".to_owned()),
        dense: vec!["age".to_owned(), "price".to_owned()],
        kept: Vec::new(),
        groups: groups.iter().map(group).collect(),
    }
}

const GROUPS: &[(&str, &[&str])] = &[("user", &["u1", "u2"]), ("history", &["h"]), ("item", &["i"])];

pub(super) fn preprocessor(steps: &str, schema: &Schema) -> crate::error::Result<Preprocessor> {
    let text = format!("format_version = 1\n{steps}");
    Preprocessor::try_new(&PreprocessConfig::parse(Path::new("preprocess.toml"), &text)?, schema)
}

/// How the rows of a feature lie in its buffer.
#[derive(Debug, Clone, Copy)]
enum Shape {
    /// Rows are contiguous.
    Contiguous,
    /// Rows are sliding windows, with unused ids between some of them.
    Windows,
    /// Rows start anywhere.
    Scattered,
}

fn feature(name: &'static str, rows: usize) -> impl Strategy<Value = Feature> {
    let shape = prop_oneof![Just(Shape::Contiguous), Just(Shape::Windows), Just(Shape::Scattered)];
    let row = (0_usize..7, 0_usize..40);
    (shape, prop::collection::vec(row, rows), any::<bool>()).prop_flat_map(move |(shape, rows, tail)| {
        let (mut offsets, mut sizes, mut place, mut values) = (Vec::new(), Vec::new(), 0, 0);
        for (size, step) in rows {
            let offset = match shape {
                Shape::Contiguous => values,
                Shape::Windows => place,
                Shape::Scattered => step,
            };
            // One step in six leaves a gap after most windows.
            place += [0, 1, 1, 2, 3, 12][step % 6];
            values = values.max(offset + size);
            offsets.push(offset as i32);
            sizes.push(size as i32);
        }
        values += if tail { 5 } else { 0 };
        // Mostly few different ids, so that lists have ids in common, and some ids of any size.
        let id = prop_oneof![8 => -3_i64..8, 1 => any::<i64>()];
        prop::collection::vec(id, values)
            .prop_map(move |values| Feature::try_new(name, values, offsets.clone(), sizes.clone()).unwrap())
    })
}

fn group(index: usize, samples: usize, inverse: bool) -> impl Strategy<Value = Group> {
    let (name, features) = GROUPS[index];
    (1_usize..5).prop_flat_map(move |distinct| {
        let rows = if inverse { distinct } else { samples };
        let features: Vec<_> = features.iter().map(|name| feature(name, rows).boxed()).collect();
        let numbers = prop::collection::vec(0..rows.max(1) as i32, if inverse { samples } else { 0 });
        (features, numbers).prop_map(move |(features, numbers)| {
            Group::try_new(name, inverse.then(|| numbers.into()), features).unwrap()
        })
    })
}

fn dense() -> impl Strategy<Value = f32> {
    prop_oneof![
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
        4 => 0.0_f32..1.0,
        4 => (-4_i32..5).prop_map(|x| x as f32),
        2 => -100.0_f32..100.0,
    ]
}

/// Generates a batch, and whether its samples have weights.
fn batches() -> impl Strategy<Value = (Batch, bool)> {
    (0_usize..12, any::<[bool; 3]>(), any::<bool>()).prop_flat_map(|(samples, inverse, weights)| {
        let groups: Vec<_> = (0..3).map(|i| group(i, samples, inverse[i]).boxed()).collect();
        let floats = |strategy: BoxedStrategy<f32>, count| prop::collection::vec(strategy, count);
        let labels = floats((0_i32..2).prop_map(|label| label as f32).boxed(), samples);
        let importance = floats((1_i32..5).prop_map(|w| w as f32).boxed(), samples);
        let times = prop::collection::vec(1_000_000_000_000_000_i64..1_800_000_000_000_000, samples);
        let dense = floats(dense().boxed(), 2 * samples);
        (groups, dense, labels, importance, times).prop_map(
            move |(groups, dense, labels, importance, times)| {
                let batch = Batch::try_new(BatchParts {
                    size: samples,
                    dense: dense.into(),
                    labels: labels.into(),
                    weights: weights.then(|| importance.into()),
                    timestamps: Some(times.into()),
                    kept: Vec::new(),
                    groups,
                });
                (batch.unwrap(), weights)
            },
        )
    })
}

fn list_op() -> impl Strategy<Value = ModelOp> {
    let max = prop_oneof![1_i64..20, Just(i64::MAX)];
    prop_oneof![
        ((0_u64..9), max.clone()).prop_map(|(salt, max)| ModelOp::SigridHash(salt, max)),
        max.prop_map(ModelOp::PositiveModulus),
        (-3_i64..3, 0_i64..6).prop_map(|(min, width)| ModelOp::ClampIds(min, min + width)),
        prop::collection::vec(-9_i64..9, 1..6).prop_map(ModelOp::MapId),
        (1_usize..6).prop_map(ModelOp::FirstX),
        (1_usize..6).prop_map(ModelOp::FirstX),
        (1_usize..6).prop_map(ModelOp::LastX),
        (1_usize..6).prop_map(ModelOp::LastX),
        (1_usize..4).prop_map(ModelOp::NgramConcat),
        (1_usize..4, 0_u64..9).prop_map(|(n, salt)| ModelOp::NgramHash(n, salt)),
        (-2_i64..3).prop_map(ModelOp::Enumerate),
        (-2_i64..3).prop_map(ModelOp::FillList),
    ]
}

fn dense_op() -> impl Strategy<Value = ModelOp> {
    prop_oneof![
        (-3_i32..3).prop_map(|min| ModelOp::ClampDense(min as f32 - 0.5, min as f32 + 2.5)),
        Just(ModelOp::Logit(1e-6)),
        Just(ModelOp::Logit(0.125)),
        (-2_i32..3).prop_map(|lambda| ModelOp::BoxCox(lambda as f32 / 2.0)),
        Just(ModelOp::Log1p),
        (-2_i32..3).prop_map(|value| ModelOp::FillDense(value as f32)),
    ]
}

fn id_op() -> impl Strategy<Value = ModelOp> {
    let borders = prop::collection::vec(-4_i32..5, 1..5).prop_map(|mut borders| {
        borders.sort_unstable();
        borders.into_iter().map(|border| border as f32).collect::<Vec<_>>()
    });
    prop_oneof![
        (borders, any::<bool>()).prop_map(|(borders, left)| ModelOp::Bucketize(borders, left)),
        (1_i64..9).prop_map(|n| ModelOp::OneHot(-2.0, 3.0, n)),
        Just(ModelOp::LocalHour),
    ]
}

fn pair_op() -> impl Strategy<Value = ModelOp> {
    prop_oneof![
        (0_u64..9, 1_i64..20).prop_map(|(salt, max)| ModelOp::Cartesian(salt, max)),
        Just(ModelOp::Intersect),
        Just(ModelOp::OverlapCount),
        Just(ModelOp::Jaccard),
    ]
}

fn sampling_op() -> impl Strategy<Value = ModelOp> {
    let rate = || prop_oneof![Just(1.0), 0.2_f64..1.0];
    prop_oneof![
        (rate(), 0_u64..5, any::<bool>()).prop_map(|(r, seed, w)| ModelOp::SamplingAll(r, seed, w)),
        (rate(), rate(), 0_u64..5, any::<bool>()).prop_map(|(a, b, seed, w)| ModelOp::Sampling(
            vec![(0.0, a), (1.0, b)],
            seed,
            w
        )),
        (rate(), 0_u64..5, any::<bool>()).prop_map(|(a, seed, w)| ModelOp::Sampling(vec![(1.0, a)], seed, w)),
    ]
}

/// An operator, two numbers that choose its inputs, and whether it generates a feature.
type Draft = (ModelOp, usize, usize, bool);

fn drafts() -> impl Strategy<Value = Vec<Draft>> {
    let op = prop_oneof![5 => list_op(), 2 => dense_op(), 1 => id_op(), 3 => pair_op(), 1 => sampling_op()];
    prop::collection::vec((op, 0_usize..20, 0_usize..20, any::<bool>()), 1..9)
}

/// The features that exist after some steps. Each list has its maximal length.
struct Names {
    lists: Vec<(String, usize)>,
    dense: Vec<String>,
}

/// Turns drafts into steps on the features that exist at that point.
fn steps(drafts: Vec<Draft>) -> Vec<ModelStep> {
    let lists = GROUPS.iter().flat_map(|(_, features)| features.iter());
    let lists = lists.map(|name| ((*name).to_owned(), 7)).collect();
    let mut names = Names { lists, dense: vec!["age".to_owned(), "price".to_owned()] };
    drafts.into_iter().enumerate().map(|(i, draft)| names.step(draft, format!("g{i}"))).collect()
}

impl Names {
    fn step(&mut self, (op, a, b, generate): Draft, name: String) -> ModelStep {
        let (a, b) = (a % self.lists.len(), b % self.lists.len());
        let dense = self.dense[a % self.dense.len()].clone();
        match op {
            ModelOp::Sampling(..) | ModelOp::SamplingAll(..) => {
                ModelStep { op, inputs: vec![], output: None }
            }
            ModelOp::LocalHour => self.new_list(op, vec![], name, 1),
            ModelOp::Bucketize(..) | ModelOp::OneHot(..) => self.new_list(op, vec![dense], name, 1),
            ModelOp::ClampDense(..)
            | ModelOp::Logit(_)
            | ModelOp::BoxCox(_)
            | ModelOp::Log1p
            | ModelOp::FillDense(_) => {
                self.dense.extend(generate.then(|| name.clone()));
                ModelStep { op, inputs: vec![dense], output: generate.then_some(name) }
            }
            ModelOp::Cartesian(..) | ModelOp::Intersect | ModelOp::OverlapCount | ModelOp::Jaccard => {
                self.of_two(op, a, b, name)
            }
            op => self.of_list(op, a, generate, name),
        }
    }

    fn new_list(&mut self, op: ModelOp, inputs: Vec<String>, name: String, length: usize) -> ModelStep {
        self.lists.push((name.clone(), length));
        ModelStep { op, inputs, output: Some(name) }
    }

    fn of_two(&mut self, op: ModelOp, a: usize, b: usize, name: String) -> ModelStep {
        let ((first, a_length), (second, b_length)) = (self.lists[a].clone(), self.lists[b].clone());
        let inputs = vec![first, second];
        match op {
            ModelOp::Cartesian(..) if a_length * b_length <= 200 => {
                self.new_list(op, inputs, name, a_length * b_length)
            }
            ModelOp::Cartesian(..) | ModelOp::Intersect => {
                self.new_list(ModelOp::Intersect, inputs, name, a_length)
            }
            op => {
                self.dense.push(name.clone());
                ModelStep { op, inputs, output: Some(name) }
            }
        }
    }

    fn of_list(&mut self, op: ModelOp, a: usize, generate: bool, name: String) -> ModelStep {
        let (input, length) = self.lists[a].clone();
        let (op, length) = match op {
            ModelOp::NgramConcat(n) => (op, length * n),
            op => (op, length),
        };
        if generate {
            return self.new_list(op, vec![input], name, length);
        }
        self.lists[a].1 = length;
        ModelStep { op, inputs: vec![input], output: None }
    }
}

fn preprocessor_of(steps: &[ModelStep], weights: bool) -> Preprocessor {
    let text: String = steps.iter().map(ModelStep::toml).collect();
    preprocessor(&text, &schema(GROUPS, weights)).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

const EPOCH: u64 = 3;

/// Applies all steps to a batch whose first sample has index `first` in the dataset.
fn run(preprocessor: &Preprocessor, batch: Batch, first: u64) -> Batch {
    let sampled = preprocessor.sampler().map(|sampler| sampler.run(&batch, EPOCH, first).1);
    preprocessor.run(sampled.unwrap_or(batch)).unwrap()
}

proptest! {
    #![proptest_config(onefold_property::cases(2000))]

    /// Checks that batches give the same result as applying each operator to each sample on its own, for any layout
    /// of rows.
    #[test]
    fn every_pipeline_equals_the_naive_model(
        (batch, weights) in batches(),
        drafts in drafts(),
        start in 0_u64..1000,
    ) {
        let steps = steps(drafts);
        let preprocessor = preprocessor_of(&steps, weights);
        let mut expected = samples_of(&batch, &schema(GROUPS, weights).dense, start);
        let mut samplings = 0;
        for step in &steps {
            step.apply(&mut expected, samplings, EPOCH);
            samplings += u64::from(matches!(step.op, ModelOp::Sampling(..) | ModelOp::SamplingAll(..)));
        }
        let found = run(&preprocessor, batch, start);
        check_schema(&found, preprocessor.schema());
        let values = |group: &Group| group.features().iter().map(|f| f.values().len()).collect::<Vec<_>>();
        for group in found.groups() {
            prop_assert_eq!(values(&group.trim()), values(group));
        }
        assert_same(&samples_of(&found, &preprocessor.schema().dense, 0), &expected);
    }

    #[test]
    fn preprocessing_before_or_after_expansion_gives_equal_samples(
        (batch, weights) in batches(),
        drafts in drafts(),
        start in any::<u64>(),
    ) {
        let preprocessor = preprocessor_of(&steps(drafts), weights);
        let expanded = run(&preprocessor, batch.expand(), start).expand();
        let found = run(&preprocessor, batch, start).expand();
        prop_assert_eq!(found.groups().len(), expanded.groups().len());
        for (found, expanded) in found.groups().iter().zip(expanded.groups()) {
            prop_assert_eq!(format!("{found:?}"), format!("{expanded:?}"));
        }
        let dense = &preprocessor.schema().dense;
        assert_same(&samples_of(&found, dense, 0), &samples_of(&expanded, dense, 0));
    }

    /// Checks that cutting an epoch into other batches changes no sample.
    #[test]
    fn batch_boundaries_do_not_matter(
        (batch, weights) in batches(),
        drafts in drafts(),
        cut in 0_usize..12,
    ) {
        let preprocessor = preprocessor_of(&steps(drafts), weights);
        let dense = &preprocessor.schema().dense;
        let cut = cut.min(batch.size());
        let (head, tail) = (part(&batch, 0..cut), part(&batch, cut..batch.size()));
        let mut parts = samples_of(&run(&preprocessor, head, 7), dense, 0);
        parts.extend(samples_of(&run(&preprocessor, tail, 7 + cut as u64), dense, 0));
        assert_same(&parts, &samples_of(&run(&preprocessor, batch, 7), dense, 0));
    }
}

/// Checks that the batch has the features of the schema, in the same order.
fn check_schema(batch: &Batch, schema: &Schema) {
    assert_eq!(batch.weights().is_some(), schema.weight.is_some());
    let of_schema: Vec<(&str, Vec<&str>)> = schema
        .groups
        .iter()
        .map(|group| (group.name.as_str(), group.features.iter().map(|f| f.name.as_str()).collect()))
        .collect();
    let of_batch: Vec<(&str, Vec<&str>)> = batch
        .groups()
        .iter()
        .map(|group| (group.name(), group.features().iter().map(Feature::name).collect()))
        .collect();
    assert_eq!(of_batch, of_schema);
}

/// Returns a range of the batch's samples.
fn part(batch: &Batch, samples: std::ops::Range<usize>) -> Batch {
    let parts = batch.clone().into_parts();
    let rows = |width: usize| samples.start * width..samples.end * width;
    let group = |group: &Group| {
        let inverse: Vec<i32> = samples.clone().map(|sample| group.row_of(sample) as i32).collect();
        Group::try_new(group.name(), Some(inverse.into()), group.features().to_vec()).unwrap()
    };
    let cut = |values: &[f32], width| values[rows(width)].to_vec().into();
    Batch::try_new(BatchParts {
        size: samples.len(),
        dense: cut(&parts.dense, 2),
        labels: cut(&parts.labels, 1),
        weights: parts.weights.map(|weights| cut(&weights, 1)),
        timestamps: parts.timestamps.map(|times| times[samples.clone()].to_vec().into()),
        kept: Vec::new(),
        groups: parts.groups.iter().map(group).collect(),
    })
    .unwrap()
}

fn small_batch() -> Batch {
    let user = vec![
        Feature::from_rows("u1", &[vec![1, 2, 3], vec![4]]).unwrap(),
        Feature::from_rows("u2", &[vec![], vec![9]]).unwrap(),
    ];
    let history = Feature::from_rows("h", &[vec![2, 4], vec![1], vec![3]]).unwrap();
    let item = Feature::from_rows("i", &[[1], [2], [3], [4]]).unwrap();
    let group = |name, inverse: Option<Vec<i32>>, features| {
        Group::try_new(name, inverse.map(Into::into), features).unwrap()
    };
    Batch::try_new(BatchParts {
        size: 4,
        dense: vec![1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0].into(),
        labels: vec![0.0, 1.0, 0.0, 1.0].into(),
        weights: None,
        timestamps: Some(vec![0, 3_600_000_000, 7_200_000_000, 10_800_000_000].into()),
        kept: Vec::new(),
        groups: vec![
            group("user", Some(vec![0, 0, 1, 1]), user),
            group("history", Some(vec![0, 0, 1, 2]), vec![history]),
            group("item", None, vec![item]),
        ],
    })
    .unwrap()
}

fn ran(steps: &str) -> Batch {
    let preprocessor = preprocessor(steps, &schema(GROUPS, false)).unwrap();
    let batch = preprocessor.run(small_batch()).unwrap();
    check_schema(&batch, preprocessor.schema());
    batch
}

#[test]
fn pairs_of_two_groups_share_a_group_of_their_own() {
    let batch = ran("
        [[step]]
        op = 'id_list_intersect'
        inputs = ['u1', 'h']
        output = 'both'
        [[step]]
        op = 'id_list_intersect'
        inputs = ['h', 'u1']
        output = 'both_backwards'
        [[step]]
        op = 'cartesian'
        inputs = ['u2', 'both']
        output = 'again'
        max = 10
        [[step]]
        op = 'compute_score'
        inputs = ['u1', 'i']
        output = 'score'
        score = 'overlap_count'
        [[step]]
        op = 'id_list_intersect'
        inputs = ['u1', 'i']
        output = 'seen'
        [[step]]
        op = 'id_list_intersect'
        inputs = ['u1', 'u2']
        output = 'same_group'");
    let names: Vec<_> = batch.groups().iter().map(|group| (group.name(), group.rows())).collect();
    let expected = [
        ("user", 2),
        ("history", 3),
        ("item", 4),
        ("user+history", 3),
        ("user+(user+history)", 3),
        ("user+item", 4),
    ];
    assert_eq!(names, expected);
    let pairs = &batch.groups()[3];
    assert_eq!(pairs.inverse().unwrap()[..], [0, 0, 1, 2]);
    let rows =
        |feature: &Feature| (0..feature.rows()).map(|row| feature.row(row).to_vec()).collect::<Vec<_>>();
    assert_eq!(rows(&pairs.features()[0]), [vec![2], vec![], vec![]]);
    assert_eq!(rows(&pairs.features()[1]), [vec![2], vec![], vec![]]);
    assert!(batch.groups()[5].inverse().is_none());
    let scores: Vec<f32> = batch.dense().chunks(3).map(|row| row[2]).collect();
    assert_eq!(scores, [1.0, 1.0, 0.0, 1.0]);
}

#[test]
fn sampling_copies_no_row_of_a_deduplicated_group() {
    let before = small_batch();
    let keep_clicks = "[[step]]\nop = 'sampling'\nlabel = 'clicked'\nkeep = { '0' = 1e-300 }";
    let preprocessor = preprocessor(keep_clicks, &schema(GROUPS, false)).unwrap();
    assert_eq!(preprocessor.schema().weight.as_deref(), Some("sample_weight"));
    let after = run(&preprocessor, before.clone(), 0);
    assert_eq!((after.size(), &after.labels()[..]), (2, &[1.0, 1.0][..]));
    assert_eq!(after.dense()[..], [2.0, 20.0, 4.0, 40.0]);
    assert_eq!(after.weights().unwrap()[..], [1.0, 1.0]);
    assert_eq!(after.timestamps().unwrap()[..], [3_600_000_000, 10_800_000_000]);
    let inverses: Vec<_> =
        after.groups().iter().map(|group| group.inverse().map(|inverse| inverse.to_vec())).collect();
    assert_eq!(inverses, [Some(vec![0, 1]), Some(vec![0, 2]), None]);
    assert_eq!(after.groups()[2].features()[0].row(1), before.groups()[2].features()[0].row(3));
    for (before, after) in before.groups()[..2].iter().zip(after.groups()) {
        assert_eq!(before.rows(), after.rows());
        for (before, after) in before.features().iter().zip(after.features()) {
            assert_eq!(before.values().as_ptr(), after.values().as_ptr());
        }
    }
}

#[test]
fn weights_correct_for_dropped_samples() {
    let steps = "[[step]]\nop = 'sampling'\nrate = 0.25\n[[step]]\nop = 'sampling'\nrate = 0.5\ncorrect_weights = false";
    let preprocessor = preprocessor(steps, &schema(GROUPS, false)).unwrap();
    let kept = |start| run(&preprocessor, small_batch(), start);
    let weights: Vec<f32> = (0..1000).flat_map(|i| kept(4 * i).weights().unwrap().to_vec()).collect();
    assert!(weights.iter().all(|weight| *weight == 4.0));
    // 4,000 samples at rate 1/8; the tolerance is five standard deviations.
    assert!((weights.len() as f64 - 500.0).abs() < 105.0, "{}", weights.len());
}

#[test]
fn untouched_dense_features_are_not_copied() {
    let batch = small_batch();
    let hash = "[[step]]\nop = 'sigrid_hash'\ninputs = ['*']\nmax = 9";
    let after = preprocessor(hash, &schema(GROUPS, false)).unwrap().run(batch.clone()).unwrap();
    assert_eq!(after.dense().as_ptr(), batch.dense().as_ptr());
}

#[test]
fn hashes_equal_those_of_torcharrow() {
    let rows = [(1..=16).collect::<Vec<i64>>()];
    let group = Group::try_new("user", None, vec![Feature::from_rows("x", &rows).unwrap()]).unwrap();
    let batch = Batch::try_new(BatchParts {
        size: 1,
        dense: vec![0.0; 2].into(),
        labels: vec![0.0].into(),
        weights: None,
        timestamps: None,
        kept: Vec::new(),
        groups: vec![group],
    });
    let hash = "[[step]]\nop = 'sigrid_hash'\ninputs = ['x']\nmax = 100";
    let hash = preprocessor(hash, &schema(&[("user", &["x"])], false)).unwrap();
    let hashed = hash.run(batch.unwrap()).unwrap();
    let expected = [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2];
    assert_eq!(hashed.groups()[0].features()[0].row(0), expected);
}

#[test]
fn the_example_of_the_documentation_runs() {
    let groups: &[(&str, &[&str])] =
        &[("user", &["user_id"]), ("history", &["history"]), ("item", &["item_id"])];
    let config = PreprocessConfig::parse(Path::new("preprocess.toml"), include_str!("example.toml")).unwrap();
    let preprocessor = Preprocessor::try_new(&config, &schema(groups, false)).unwrap();
    assert!(preprocessor.needs_timestamps());
    let schema = preprocessor.schema();
    schema.validate().unwrap();
    let names: Vec<_> = schema.sparse_features().map(|feature| feature.name.as_str()).collect();
    assert_eq!(names, ["user_id", "history", "item_id", "user_x_item", "age_group", "hour"]);
    assert_eq!(schema.dense, ["age", "price", "history_has_item"]);
    assert_eq!(schema.weight.as_deref(), Some("sample_weight"));
}

#[test]
fn a_batch_of_another_schema_is_refused() {
    let hour = "[[step]]\nop = 'get_local_hour'\noutput = 'hour'\nzone = 'UTC'";
    let refused = |schema: &Schema, batch: Batch| {
        preprocessor(hour, schema).unwrap().run(batch).unwrap_err().to_string()
    };
    let right = schema(GROUPS, false);
    assert_eq!(
        refused(&schema(GROUPS, true), small_batch()),
        "sample weights: the schema has 1, the batch 0"
    );
    assert_eq!(refused(&schema(&GROUPS[..2], false), small_batch()), "groups: the schema has 2, the batch 3");
    let renamed: &[(&str, &[&str])] = &[GROUPS[0], GROUPS[1], ("item", &["j"])];
    assert!(
        refused(&schema(renamed, false), small_batch()).starts_with("group `item`: the batch has `item`")
    );
    let wide = Schema { dense: vec!["age".to_owned()], ..right.clone() };
    assert_eq!(refused(&wide, small_batch()), "dense features: the schema has 1, the batch 2");
    let mut timeless = small_batch().into_parts();
    timeless.timestamps = None;
    let message = refused(&right, Batch::try_new(timeless).unwrap());
    assert_eq!(message, "timestamps: the batch has none, but a step of the preprocessing needs them");
}

#[test]
fn errors_at_run_time_name_the_step() {
    let mut parts = small_batch().into_parts();
    let long = Feature::from_rows("i", &[vec![7; 40_000], vec![], vec![], vec![]]).unwrap();
    parts.groups[2] = Group::try_new("item", None, vec![long]).unwrap();
    let ngram = "[[step]]\nop = 'ngram'\ninputs = ['i']\nn = 20000";
    let ngram = preprocessor(ngram, &schema(GROUPS, false)).unwrap();
    let message = ngram.run(Batch::try_new(parts).unwrap()).unwrap_err().to_string();
    let expected = "`preprocess.toml`, line 2, step 1 (`ngram`): `i` would have 400020000 ids in one batch";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn preprocessors_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Preprocessor>();
}
