//! Tests that the bytes of batches have not changed since [`SAME_BYTES`] was last increased. Each change of the bytes
//! must increase that number: an epoch's batches come from workers with equal numbers, whose program versions may
//! differ, so equal numbers must mean equal bytes.

use std::path::Path;

use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};
use sha2::{Digest, Sha256};

use super::protocol::SAME_BYTES;
use crate::batch::{Batch, BatchParts, Feature, Group, PackedBatch};
use crate::preprocess::{PreprocessConfig, Preprocessor, operator_names};

/// The value of [`SAME_BYTES`] for which the outcomes below were stored.
const STORED: u32 = 4;

const CHANGED: &str =
    "batches have changed: raise `SAME_BYTES`, store the new outcome here, and set `STORED` to that number";

/// The preprocessing steps, each with the columns that it changes or creates. Another program computed the expected
/// numbers from the definitions of the operators. All C libraries round these numbers in the same way.
const CASES: &[(&str, &[&str])] = &[
    (
        "op = 'sigrid_hash'\ninputs = ['u']\nsalt = 7\nmax = 1000",
        &["user/u [0, 0, 1, 2] [[537, 84, 252, 84], [], [419, 192]]"],
    ),
    (
        "op = 'positive_modulus'\ninputs = ['u']\nmodulus = 4",
        &["user/u [0, 0, 1, 2] [[3, 1, 0, 1], [], [3, 1]]"],
    ),
    (
        "op = 'clamp'\ninputs = ['u', 'age']\nmin = 0\nmax = 2",
        &["age [0.0, 2.0, NaN, 0.0]", "user/u [0, 0, 1, 2] [[2, 1, 2, 1], [], [0, 2]]"],
    ),
    (
        "op = 'map_id'\ninputs = ['u']\ntable = [10, 11, 12]",
        &["user/u [0, 0, 1, 2] [[10, 11, 11, 11], [], [0, 10]]"],
    ),
    ("op = 'firstx'\ninputs = ['u']\ncount = 1", &["user/u [0, 0, 1, 2] [[3], [], [-5]]"]),
    ("op = 'lastx'\ninputs = ['u']\ncount = 1", &["user/u [0, 0, 1, 2] [[1], [], [9]]"]),
    ("op = 'ngram'\ninputs = ['u']\nn = 2", &["user/u [0, 0, 1, 2] [[3, 1, 1, 4, 4, 1], [], [-5, 9]]"]),
    (
        "op = 'ngram'\ninputs = ['u']\nn = 2\ncombine = 'hash'\nsalt = 5",
        &[
            "user/u [0, 0, 1, 2] [[4820114163142997880, 5327381007561919740, 8756271603779710327], [], [3837890418830930524]]",
        ],
    ),
    ("op = 'enumerate'\ninputs = ['u']\nstart = 5", &["user/u [0, 0, 1, 2] [[5, 6, 7, 8], [], [5, 6]]"]),
    (
        "op = 'fill_null'\ninputs = ['u', 'age']\nvalue = 8",
        &["age [0.0, 3.0, 8.0, -1.0]", "user/u [0, 0, 1, 2] [[3, 1, 4, 1], [8], [-5, 9]]"],
    ),
    ("op = 'logit'\ninputs = ['price']", &["price [0.0, -1.0986123, 1.0986123, 13.802318]"]),
    ("op = 'boxcox'\ninputs = ['price']\nlambda = 0.5", &["price [-0.58578646, -1.0, -0.26794922, 0.0]"]),
    ("op = 'log1p'\ninputs = ['age']", &["age [0.0, 1.3862944, NaN, -inf]"]),
    (
        "op = 'bucketize'\ninputs = ['age']\noutput = 'y'\nborders = [0, 2]",
        &["per_sample/y - [[0], [2], [0], [0]]"],
    ),
    (
        "op = 'bucketize'\ninputs = ['age']\noutput = 'y'\nborders = [0, 2]\nedges = 'left'",
        &["per_sample/y - [[1], [2], [0], [0]]"],
    ),
    (
        "op = 'onehot'\ninputs = ['age']\noutput = 'y'\nlow = 0\nhigh = 4\nbuckets = 4",
        &["per_sample/y - [[0], [3], [0], [0]]"],
    ),
    (
        "op = 'get_local_hour'\noutput = 'y'\nzone = 'Europe/Copenhagen'",
        &["per_sample/y - [[1], [3], [1], [11]]"],
    ),
    (
        "op = 'cartesian'\ninputs = ['u', 'i']\noutput = 'y'\nmax = 1000\nsalt = 7",
        &["user+item/y - [[896, 883, 394, 883], [757, 761, 315, 971, 202, 360, 315, 971], [], []]"],
    ),
    ("op = 'id_list_intersect'\ninputs = ['u', 'i']\noutput = 'y'", &["user+item/y - [[1], [3], [], []]"]),
    (
        "op = 'id_list_intersect'\ninputs = ['u', 'v']\noutput = 'y'",
        &["user/y [0, 0, 1, 2] [[1, 4], [], [9]]"],
    ),
    (
        "op = 'compute_score'\ninputs = ['u', 'i']\noutput = 'y'\nscore = 'overlap_count'",
        &["y [1.0, 1.0, 0.0, 0.0]"],
    ),
    (
        "op = 'compute_score'\ninputs = ['u', 'i']\noutput = 'y'\nscore = 'jaccard'",
        &["y [0.33333334, 0.25, 0.0, 0.0]"],
    ),
];

fn schema() -> Schema {
    let group = |name: &str, deduplicated, features: &[&str]| FeatureGroup {
        name: name.to_owned(),
        deduplicated,
        features: features.iter().map(|name| SparseFeature::new(*name, SparseKind::Sparse)).collect(),
    };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec!["age".to_owned(), "price".to_owned()],
        kept: Vec::new(),
        groups: vec![group("user", true, &["u", "v"]), group("item", false, &["i"])],
    }
}

fn batch() -> Batch {
    let feature = |name: &str, rows: &[&[i64]]| Feature::from_rows(name, rows).unwrap();
    let user = vec![feature("u", &[&[3, 1, 4, 1], &[], &[-5, 9]]), feature("v", &[&[1, 4], &[7], &[9]])];
    let item = vec![feature("i", &[&[1], &[7, 3], &[9], &[]])];
    let times = vec![1_679_792_399_999_999_i64, 1_679_792_400_000_000, 0, 1_720_000_000_000_000];
    Batch::try_new(BatchParts {
        size: 4,
        dense: vec![0.0, 0.5, 3.0, 0.25, f32::NAN, 0.75, -1.0, 1.0].into(),
        labels: vec![1.0, 0.0, 0.0, 1.0].into(),
        weights: None,
        timestamps: Some(times.into()),
        kept: Vec::new(),
        groups: vec![
            Group::try_new("user", Some(vec![0, 0, 1, 2].into()), user).unwrap(),
            Group::try_new("item", None, item).unwrap(),
        ],
    })
    .unwrap()
}

/// Returns a line for each dense feature and each list feature.
fn lines(batch: &Batch, schema: &Schema) -> Vec<String> {
    let dense = schema.dense.iter().enumerate().map(|(i, name)| {
        let column: Vec<f32> = batch.dense().iter().skip(i).step_by(schema.dense.len()).copied().collect();
        format!("{name} {column:?}")
    });
    let lists = batch.groups().iter().flat_map(|group| {
        let inverse = group.inverse().map_or("-".to_owned(), |inverse| format!("{:?}", &inverse[..]));
        let line = move |feature: &Feature| {
            let rows: Vec<&[i64]> = (0..feature.rows()).map(|row| feature.row(row)).collect();
            format!("{}/{} {inverse} {rows:?}", group.name(), feature.name())
        };
        group.features().iter().map(line)
    });
    dense.chain(lists).collect()
}

fn preprocessor(step: &str) -> Preprocessor {
    let text = format!("format_version = 1\n[[step]]\n{step}\n");
    let config = PreprocessConfig::parse(Path::new("preprocess.toml"), &text).unwrap();
    Preprocessor::try_new(&config, &schema()).unwrap()
}

#[test]
fn stored_results_belong_to_the_current_version() {
    assert_eq!(SAME_BYTES, STORED, "look whether the outcomes below have changed, and set `STORED`");
}

#[test]
fn results_of_operators_have_not_changed() {
    let before = lines(&batch(), &schema());
    for (step, expected) in CASES {
        let preprocessor = preprocessor(step);
        let after = lines(&preprocessor.run(batch()).unwrap(), preprocessor.schema());
        let changed: Vec<&String> = after.iter().filter(|line| !before.contains(line)).collect();
        assert_eq!(changed, *expected, "{step}\n{CHANGED}");
    }
    for operator in operator_names().filter(|name| *name != "sampling") {
        let name = format!("op = '{operator}'");
        assert!(CASES.iter().any(|(step, _)| step.contains(&name)), "store an outcome of `{operator}` here");
    }
}

#[test]
fn results_of_sampling_have_not_changed() {
    let preprocessor = preprocessor("op = 'sampling'\nlabel = 'clicked'\nkeep = { '1' = 0.25 }\nseed = 42");
    let kept = preprocessor.sampler().unwrap().keep(3, 100, 64, |_, sample| (sample % 2) as f32);
    let expected: &[u32] = &[
        0, 1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14, 15, 16, 18, 20, 21, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40,
        42, 44, 45, 46, 48, 50, 52, 54, 56, 58, 60, 62, 63,
    ];
    assert_eq!(kept, expected, "{CHANGED}");
}

#[test]
fn bytes_of_packed_batches_have_not_changed() {
    let packed = PackedBatch::copy_of(&batch(), (2, 1), true);
    let digest = Sha256::digest(packed.memory().as_slice());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = "2d6cddbbe6821796b0f5b660e3ea7e0fb7a3e761e885ce8f4c26b42fc8e73d6f";
    assert_eq!(digest, expected, "{CHANGED}");
}
