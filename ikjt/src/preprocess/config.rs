//! `preprocess.toml`: parses the steps and checks each one on its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono_tz::Tz;
use onefold_base::fault::{Fault, Kind};
use onefold_base::versioned::parse_toml;
use onefold_datasets::suggest;
use serde::{Deserialize, Serialize};
use toml::{Spanned, Table};

use super::arguments::{Arguments, Number, TableFiles};
use super::dense::{DenseOp, IdOp, bucketize, logit, onehot};
use super::lists::{Cut, RowOp, enumerate, ngram};
use super::local_hour;
use super::pairs::{PairOp, cartesian, compute_score};
use super::per_value::{ValueOp, map_id, positive_modulus, sigrid_hash};
use super::problem::{Checked, Problem, StepLocation};
use super::sampling::{Sampling, sampling};
use crate::error::{Error, Result};

/// The version of `preprocess.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;

/// A parsed `preprocess.toml`. Each step is valid on its own; [`Preprocessor::try_new`](super::Preprocessor::try_new)
/// checks the steps against a schema.
///
/// The serialized form contains the text of the file and of the files that it refers to, so that another host reads
/// the same steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "Source", into = "Source")]
pub struct PreprocessConfig {
    pub(super) steps: Vec<Step>,
    source: Arc<Source>,
}

/// The serialized form of a [`PreprocessConfig`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    /// The path of the file, for error messages.
    path: PathBuf,
    text: String,
    /// The texts of the files that steps refer to, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    files: BTreeMap<String, String>,
    /// Whether the `sampling` steps are removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    without_sampling: bool,
    /// Whether all other steps are removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    only_sampling: bool,
}

impl TryFrom<Source> for PreprocessConfig {
    type Error = Error;

    fn try_from(source: Source) -> Result<Self> {
        let config = Self::from_parts(source.path, source.text, TableFiles::known(source.files))?;
        let config = if source.without_sampling { config.without_sampling() } else { config };
        Ok(if source.only_sampling { config.only_sampling() } else { config })
    }
}

impl From<PreprocessConfig> for Source {
    fn from(config: PreprocessConfig) -> Self {
        Arc::unwrap_or_clone(config.source)
    }
}

/// One `[[step]]`.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) location: StepLocation,
    /// Names of features, or globs.
    pub(super) inputs: Vec<String>,
    /// The name of the new feature. If `None`, the step changes its inputs.
    pub(super) output: Option<String>,
    pub(super) op: Op,
}

/// The operation of a step.
#[derive(Debug, Clone)]
pub(super) enum Op {
    /// Maps each id of a list.
    PerValue(ValueOp),
    /// Keeps the first or the last ids of a list.
    Cut(Cut),
    /// Maps each list as a whole.
    PerRow(RowOp),
    /// Maps a dense feature to a dense feature.
    Dense(DenseOp),
    /// Clamps ids or dense values to a range.
    Clamp { min: Option<Number>, max: Option<Number> },
    /// Replaces missing values: empty lists, and dense values that are NaN.
    FillNull(Number),
    /// Maps a dense feature to one id.
    ToId(IdOp),
    /// Maps the sample's time to one id.
    LocalHour(Tz),
    /// Maps two lists to a list or to a dense feature.
    Pair(PairOp),
    /// Drops samples.
    Sampling(Sampling),
}

/// An operator: its name, its keys, and the function that parses them into an [`Op`].
struct Operator {
    name: &'static str,
    /// Whether the operator also has the key `inputs`, and `output` according to the next field.
    inputs: bool,
    output: Output,
    keys: &'static [&'static str],
    parse: fn(&mut Arguments) -> Checked<Op>,
}

#[derive(Clone, Copy, PartialEq)]
enum Output {
    No,
    Optional,
    Required,
}

impl Operator {
    const fn new(
        name: &'static str,
        output: Output,
        keys: &'static [&'static str],
        parse: fn(&mut Arguments) -> Checked<Op>,
    ) -> Self {
        Self { name, inputs: true, output, keys, parse }
    }

    const fn without_inputs(self) -> Self {
        Self { inputs: false, ..self }
    }

    fn known_keys(&self) -> Vec<&'static str> {
        let mut known = vec!["op"];
        known.extend(self.inputs.then_some("inputs"));
        known.extend((self.output != Output::No).then_some("output"));
        known.extend(self.keys);
        known
    }
}

use Output::{No, Optional, Required};

const OPERATORS: &[Operator] = &[
    Operator::new("sigrid_hash", Optional, &["salt", "max"], |a| sigrid_hash(a).map(Op::PerValue)),
    Operator::new("positive_modulus", Optional, &["modulus"], |a| positive_modulus(a).map(Op::PerValue)),
    Operator::new("clamp", Optional, &["min", "max"], clamp),
    Operator::new("map_id", Optional, &["table", "table_file"], |a| map_id(a).map(Op::PerValue)),
    Operator::new("firstx", Optional, &["count"], |a| count(a).map(Cut::First).map(Op::Cut)),
    Operator::new("lastx", Optional, &["count"], |a| count(a).map(Cut::Last).map(Op::Cut)),
    Operator::new("ngram", Optional, &["n", "combine", "salt"], |a| ngram(a).map(Op::PerRow)),
    Operator::new("enumerate", Optional, &["start"], |a| enumerate(a).map(Op::PerRow)),
    Operator::new("fill_null", Optional, &["value"], |a| a.required("value").map(Op::FillNull)),
    Operator::new("logit", Optional, &["epsilon"], |a| logit(a).map(Op::Dense)),
    Operator::new("boxcox", Optional, &["lambda"], |a| {
        a.finite("lambda", None).map(|lambda| Op::Dense(DenseOp::BoxCox { lambda }))
    }),
    Operator::new("log1p", Optional, &[], |_| Ok(Op::Dense(DenseOp::Log1p))),
    Operator::new("bucketize", Required, &["borders", "edges"], |a| bucketize(a).map(Op::ToId)),
    Operator::new("onehot", Required, &["low", "high", "buckets"], |a| onehot(a).map(Op::ToId)),
    Operator::new("get_local_hour", Required, &["zone"], |a| local_hour::zone(a).map(Op::LocalHour))
        .without_inputs(),
    Operator::new("cartesian", Required, &["max", "salt"], |a| cartesian(a).map(Op::Pair)),
    Operator::new("id_list_intersect", Required, &[], |_| Ok(Op::Pair(PairOp::Intersect))),
    Operator::new("compute_score", Required, &["score"], |a| compute_score(a).map(Op::Pair)),
    Operator::new("sampling", No, &["label", "keep", "rate", "seed", "correct_weights"], |a| {
        sampling(a).map(Op::Sampling)
    })
    .without_inputs(),
];

fn clamp(arguments: &mut Arguments) -> Checked<Op> {
    let (min, max) = (arguments.optional::<Number>("min")?, arguments.optional::<Number>("max")?);
    let order = min.zip(max).map(|(min, max)| match (min, max) {
        (Number::Integer(min), Number::Integer(max)) => min <= max,
        _ => min.real() <= max.real(),
    });
    let not_a_number = [min, max].into_iter().flatten().any(|bound| bound.real().is_nan());
    if order == Some(false) || not_a_number || (min.is_none() && max.is_none()) {
        return Err(Problem::new(
            "`min` and `max` are not a range",
            "give one of them, or both with `min` not above `max`",
        ));
    }
    Ok(Op::Clamp { min, max })
}

/// Takes `count`, the number of ids to keep.
fn count(arguments: &mut Arguments) -> Checked<usize> {
    Ok(arguments.integer("count", None, (1, i64::from(i32::MAX)))? as usize)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Checked by [`parse_toml`].
    #[serde(rename = "format_version")]
    _format_version: u32,
    #[serde(default)]
    step: Vec<Spanned<Table>>,
}

impl PreprocessConfig {
    /// Reads a `preprocess.toml` and checks each of its steps.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be read. [`Error::Fault`] if it is not TOML of this version.
    /// [`Error::Fault`], with line, number and operator of the step, for an unknown operator, for a key that is
    /// unknown, missing or of the wrong type, for a value out of range, and for a `table_file` that cannot be read.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Parses and checks the text of a `preprocess.toml`. `path` is the path that the text has, or would have.
    ///
    /// # Errors
    ///
    /// See [`load`](Self::load). Reads only the files that steps refer to.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let directory = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Self::from_parts(path.to_owned(), text.to_owned(), TableFiles::of_directory(directory))
    }

    /// Returns a text of the parsed steps. It is equal for pipelines that do the same, independent of their spelling, the
    /// order of a step's keys and the paths of their files. Steps that were left out are not in it.
    pub(crate) fn content(&self) -> String {
        // `source` is the text from which the steps were parsed. A new field of a step does not compile until it is
        // handled here.
        let Self { steps, source: _ } = self;
        let decides = |Step { location: _, inputs, output, op }: &Step| format!("{:?}", (inputs, output, op));
        steps.iter().map(decides).collect::<Vec<_>>().join("\n")
    }

    fn from_parts(path: PathBuf, text: String, mut files: TableFiles) -> Result<Self> {
        let hint = "a `preprocess.toml` has `format_version = 1` and `[[step]]` tables";
        let file: File = parse_toml(&text, FORMAT_VERSION, hint)
            .map_err(|(message, hint)| Fault::of_file(Kind::Options, &path, message).hint(hint))?;
        let shared: Arc<Path> = path.as_path().into();
        let steps = file.step.into_iter().enumerate().map(|(index, step)| {
            let before = text.get(..step.span().start).unwrap_or_default();
            let line = 1 + before.bytes().filter(|byte| *byte == b'\n').count();
            parse_step(Arc::clone(&shared), &mut files, (index + 1, line), step.into_inner())
        });
        let steps = steps.collect::<Result<_>>()?;
        let source =
            Source { path, text, files: files.into_texts(), without_sampling: false, only_sampling: false };
        Ok(Self { steps, source: Arc::new(source) })
    }

    /// Returns the configuration without the steps that drop samples.
    #[must_use]
    pub fn without_sampling(mut self) -> Self {
        self.steps.retain(|step| !matches!(step.op, Op::Sampling(_)));
        Arc::make_mut(&mut self.source).without_sampling = true;
        self
    }

    /// Returns the configuration with only the steps that drop samples.
    #[must_use]
    pub fn only_sampling(mut self) -> Self {
        self.steps.retain(|step| matches!(step.op, Op::Sampling(_)));
        Arc::make_mut(&mut self.source).only_sampling = true;
        self
    }
}

/// The names of all operators.
#[cfg(all(test, feature = "service"))]
pub(crate) fn operator_names() -> impl Iterator<Item = &'static str> {
    OPERATORS.iter().map(|operator| operator.name)
}

fn parse_step(
    path: Arc<Path>,
    files: &mut TableFiles,
    (step, line): (usize, usize),
    table: Table,
) -> Result<Step> {
    let mut arguments = Arguments::new(table, files);
    let location = |op: &str| StepLocation { path, line, step, op: op.into() };
    let name: String = match arguments.required("op") {
        Ok(name) => name,
        Err(problem) => return Err(location("no operator").error(problem)),
    };
    let location = location(&name);
    let parsed = parse_operator(&name, &mut arguments);
    let (inputs, output, op) = parsed.map_err(|problem| location.error(problem))?;
    Ok(Step { location, inputs, output, op })
}

type Parsed = (Vec<String>, Option<String>, Op);

fn parse_operator(name: &str, arguments: &mut Arguments) -> Checked<Parsed> {
    let operator = OPERATORS.iter().find(|operator| operator.name == name).ok_or_else(|| {
        let known = OPERATORS.iter().map(|operator| operator.name);
        Problem::new(format!("there is no operator `{name}`"), suggest(name, known))
    })?;
    arguments.refuse_unknown(&operator.known_keys())?;
    let inputs: Vec<String> = if operator.inputs { arguments.required("inputs")? } else { Vec::new() };
    if operator.inputs && inputs.is_empty() {
        return Err(Problem::new("`inputs` is empty", "name the features, or write `inputs = [\"*\"]`"));
    }
    let output = match operator.output {
        Required => Some(arguments.required("output")?),
        Optional => arguments.optional("output")?,
        No => None,
    };
    Ok((inputs, output, (operator.parse)(arguments)?))
}

#[cfg(test)]
mod tests {
    use onefold_base::fault::Explain;

    use super::*;

    fn parse(step: &str) -> Result<PreprocessConfig> {
        let text =
            format!("format_version = 1\n\n[[step]]\nop = 'log1p'\ninputs = ['x']\n\n[[step]]\n{step}");
        PreprocessConfig::parse(Path::new("preprocess.toml"), &text)
    }

    fn refused(step: &str) -> String {
        parse(step).unwrap_err().to_string()
    }

    #[test]
    fn the_example_of_the_documentation_is_valid() {
        let config = PreprocessConfig::parse(Path::new("preprocess.toml"), include_str!("example.toml"));
        assert_eq!(config.unwrap().steps.len(), 9);
    }

    /// Checks that the reference has, for every operator, a table row with all of its keys and an example that can be
    /// parsed.
    #[test]
    fn the_reference_lists_every_operator() {
        let page = include_str!("../../../docs/src/reference/preprocess-toml.md");
        let mut examples = Vec::new();
        for block in page.split("```toml\n").skip(1) {
            let text = block.split("```").next().unwrap();
            let version = if text.contains("format_version") { "" } else { "format_version = 1\n" };
            let config =
                PreprocessConfig::parse(Path::new("preprocess.toml"), &format!("{version}{text}")).unwrap();
            examples.extend(config.steps.iter().map(|step| step.location.op.clone()));
        }
        for operator in OPERATORS {
            assert!(examples.iter().any(|op| **op == *operator.name), "no example of `{}`", operator.name);
            let start = format!("| `{}` |", operator.name);
            let rows: Vec<&str> = page.lines().filter(|line| line.starts_with(&start)).collect();
            assert!(!rows.is_empty(), "no row of `{}`", operator.name);
            for row in rows {
                for key in operator.keys {
                    assert!(row.contains(&format!("`{key}`")), "`{key}` is missing: {row}");
                }
            }
        }
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
        for (name, _) in rows.filter(|(name, _)| !["op", "inputs", "output"].contains(name)) {
            assert!(OPERATORS.iter().any(|operator| operator.name == name), "there is no operator `{name}`");
        }
    }

    #[test]
    fn an_error_names_line_step_and_operator() {
        assert_eq!(
            refused("op = 'firstx'\ninputs = ['x']\ncount = 0"),
            "`preprocess.toml`, line 7, step 2 (`firstx`): `count` is 0, which is out of range\n  \
             hint: it must be at least 1"
        );
        assert_eq!(
            refused("op = 'sigrid_hsh'").lines().next().unwrap(),
            "`preprocess.toml`, line 7, step 2 (`sigrid_hsh`): there is no operator `sigrid_hsh`"
        );
        assert!(refused("op = 'sigrid_hsh'").contains("did you mean `sigrid_hash`?"));
        assert!(refused("inputs = ['x']").contains("step 2 (`no operator`): `op` is missing"));
        let unknown = refused("op = 'firstx'\ninputs = ['x']\ncuont = 3");
        assert!(unknown.contains("unknown key `cuont`\n  hint: did you mean `count`?"), "{unknown}");
    }

    #[test]
    fn every_parameter_is_checked() {
        let cases = [
            ("op = 'firstx'\ninputs = ['x']", "`count` is missing"),
            ("op = 'firstx'\ninputs = ['x']\ncount = '3'", "`count`: invalid type"),
            ("op = 'firstx'\ninputs = []\ncount = 3", "`inputs` is empty"),
            ("op = 'firstx'\ncount = 3", "`inputs` is missing"),
            ("op = 'firstx'\ninputs = ['x']\ncount = 2147483648", "at most 2147483647"),
            ("op = 'sigrid_hash'\ninputs = ['x']\nmax = 0", "`max` is 0"),
            ("op = 'sigrid_hash'\ninputs = ['x']\nmax = 1\nsalt = -1", "`salt`: invalid value"),
            ("op = 'positive_modulus'\ninputs = ['x']\nmodulus = -2", "`modulus` is -2"),
            ("op = 'clamp'\ninputs = ['x']", "not a range"),
            ("op = 'clamp'\ninputs = ['x']\nmin = 2\nmax = 1", "not a range"),
            ("op = 'clamp'\ninputs = ['x']\nmin = nan", "not a range"),
            ("op = 'map_id'\ninputs = ['x']", "one of `table` and `table_file`"),
            ("op = 'map_id'\ninputs = ['x']\ntable = []", "the table is empty"),
            ("op = 'map_id'\ninputs = ['x']\ntable_file = 'none.txt'", "none.txt"),
            ("op = 'ngram'\ninputs = ['x']\nn = 0", "`n` is 0"),
            ("op = 'ngram'\ninputs = ['x']\nn = 2\ncombine = 'sum'", "unknown variant `sum`"),
            ("op = 'ngram'\ninputs = ['x']\nn = 2\nsalt = 1", "`salt` is of no use"),
            ("op = 'enumerate'\ninputs = ['x']\nstart = 9223372036854775807", "`start` is"),
            ("op = 'fill_null'\ninputs = ['x']", "`value` is missing"),
            ("op = 'logit'\ninputs = ['x']\nepsilon = 0.5", "`epsilon` is 0.5"),
            ("op = 'logit'\ninputs = ['x']\nepsilon = 1e-9", "no room between 0 and 1"),
            ("op = 'boxcox'\ninputs = ['x']\nlambda = inf", "`lambda` is inf, which is not finite"),
            ("op = 'bucketize'\ninputs = ['x']\nborders = [1]", "`output` is missing"),
            ("op = 'bucketize'\ninputs = ['x']\noutput = 'y'\nborders = []", "`borders` is empty"),
            ("op = 'bucketize'\ninputs = ['x']\noutput = 'y'\nborders = [2, 1]", "2 is before 1"),
            ("op = 'bucketize'\ninputs = ['x']\noutput = 'y'\nborders = [1, nan]", "not finite"),
            ("op = 'bucketize'\ninputs = ['x']\noutput = 'y'\nborders = [1e39]", "not finite"),
            ("op = 'onehot'\ninputs = ['x']\noutput = 'y'\nlow = 1\nhigh = 1\nbuckets = 2", "no width"),
            ("op = 'onehot'\ninputs = ['x']\noutput = 'y'\nlow = 0\nhigh = 1\nbuckets = 0", "`buckets` is 0"),
            ("op = 'get_local_hour'\noutput = 'y'\nzone = 'Europe/Copenhagn'", "no time zone"),
            ("op = 'get_local_hour'\noutput = 'y'\nzone = 'UTC'\ninputs = ['x']", "unknown key `inputs`"),
            ("op = 'cartesian'\ninputs = ['x', 'y']\noutput = 'z'\nmax = 0", "`max` is 0"),
            ("op = 'compute_score'\ninputs = ['x', 'y']\noutput = 'z'\nscore = 'dice'", "unknown variant"),
            ("op = 'sampling'", "neither `label` and `keep` nor `rate`"),
            ("op = 'sampling'\nrate = 0.5\nlabel = 'y'", "neither `label` and `keep` nor `rate`"),
            ("op = 'sampling'\nrate = 0", "`rate` is 0, which is not a rate"),
            ("op = 'sampling'\nrate = nan", "which is not a rate"),
            ("op = 'sampling'\nlabel = 'y'\nkeep = {}", "`keep` is empty"),
            ("op = 'sampling'\nlabel = 'y'\nkeep = { a = 1.0 }", "`a` is not a number"),
            ("op = 'sampling'\nlabel = 'y'\nkeep = { '0' = 1.0, '0.0' = 1.0 }", "or is there twice"),
            ("op = 'sampling'\nlabel = 'y'\nkeep = { '0' = 1.5 }", "`keep.\"0\"` is 1.5"),
            ("op = 'sampling'\nrate = 0.5\noutput = 'y'", "unknown key `output`"),
        ];
        for (step, expected) in cases {
            let message = refused(step);
            assert!(message.contains(expected), "{step}\n{message}");
            assert!(message.contains("step 2") && message.contains("\n  hint: "), "{message}");
        }
    }

    #[test]
    fn sent_pipelines_can_omit_or_isolate_sampling() {
        let config = parse("op = 'sampling'\nrate = 0.5").unwrap();
        let operators = |config: &PreprocessConfig| -> Vec<String> {
            config.steps.iter().map(|step| step.location.op.to_string()).collect()
        };
        assert_eq!(operators(&config), ["log1p", "sampling"]);
        for (config, left) in
            [(config.clone().without_sampling(), "log1p"), (config.only_sampling(), "sampling")]
        {
            let sent = serde_json::to_string(&config).unwrap();
            let received: PreprocessConfig = serde_json::from_str(&sent).unwrap();
            for config in [&config, &received] {
                assert_eq!(operators(config), [left]);
            }
        }
    }

    #[test]
    fn a_near_time_zone_is_suggested() {
        let message = refused("op = 'get_local_hour'\noutput = 'y'\nzone = 'Europe/Copenhagn'");
        assert!(message.contains("did you mean `Europe/Copenhagen`?"), "{message}");
        let message = refused("op = 'get_local_hour'\noutput = 'y'\nzone = 'Mars/Quietus'");
        assert!(message.contains("IANA"), "{message}");
    }

    #[test]
    fn a_file_that_is_no_pipeline_is_refused_as_a_whole() {
        let refused = |text| {
            let error = PreprocessConfig::parse(Path::new("preprocess.toml"), text).unwrap_err();
            assert_eq!(error.fault().kind, Kind::Options);
            error.to_string()
        };
        assert!(refused("format_version = 2").contains("`format_version` is 2"));
        assert!(refused("format_version = 1\n[[steps]]\nop = 'log1p'").contains("unknown field `steps`"));
        assert!(refused("format_version = 1\n[[step]\n").contains("line 2"));
    }

    #[test]
    fn a_table_file_is_relative_to_the_pipeline() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("preprocess.toml");
        let step = "format_version = 1\n[[step]]\nop = 'map_id'\ninputs = ['x']\ntable_file = 'ids.txt'";
        fs_err::write(&file, step).unwrap();
        fs_err::write(directory.path().join("ids.txt"), "7\n-8\n").unwrap();
        let config = PreprocessConfig::load(&file).unwrap();
        let sent = serde_json::to_string(&config).unwrap();
        fs_err::write(directory.path().join("ids.txt"), "7\neight\n").unwrap();
        let received: PreprocessConfig = serde_json::from_str(&sent).unwrap();
        assert_eq!(
            format!("{:?}", received.steps),
            format!("{:?}", config.steps),
            "the file came with the steps"
        );
        let without = sent.replace("ids.txt\":", "other.txt\":");
        let message = serde_json::from_str::<PreprocessConfig>(&without).unwrap_err().to_string();
        assert!(message.contains("`ids.txt` did not come with the steps"), "{message}");
        let message = PreprocessConfig::load(&file).unwrap_err().to_string();
        assert!(message.contains("ids.txt`, line 2: `eight` is not a 64-bit integer"), "{message}");
    }
}
