//! The plan: binds steps to a schema, and turns them into actions on a batch.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono_tz::Tz;
use onefold_datasets::{Schema, SparseKind};

use super::arguments::Number;
use super::config::{Op, PreprocessConfig, Step};
use super::dense::{DenseOp, IdOp};
use super::layout::{Column, FeatureLayout, Kinds, SparseAt};
use super::lists::RowOp;
use super::pairs::{PairOp, Score};
use super::per_value::{Chain, ValueOp};
use super::problem::{Checked, Problem, StepLocation};
use super::sampling::{Rates, Sampler, Sampling};
use crate::error::Result;
use crate::hash::SigridHash;

/// One action on a batch. A new feature becomes the last one of its group.
#[derive(Debug)]
pub(super) enum Action {
    /// Adds a feature with the lists of another feature of the same group.
    Copy {
        from: SparseAt,
        name: Arc<str>,
    },
    /// Runs several steps on one feature in one pass.
    Chain {
        at: SparseAt,
        chain: Chain,
    },
    PerRow {
        at: SparseAt,
        op: RowOp,
    },
    /// Adds a dense feature with the values of another one.
    CopyDense {
        from: usize,
        to: usize,
    },
    Dense {
        at: usize,
        op: DenseOp,
    },
    ToId {
        from: usize,
        group: usize,
        name: Arc<str>,
        op: IdOp,
    },
    LocalHour {
        zone: Tz,
        group: usize,
        name: Arc<str>,
    },
    /// Adds a feature to `group`, which has a row per distinct pair of rows.
    List {
        inputs: (SparseAt, SparseAt),
        group: usize,
        name: Arc<str>,
        op: ListOfPair,
    },
    Score {
        inputs: (SparseAt, SparseAt),
        group: usize,
        to: usize,
        score: Score,
    },
}

impl Action {
    /// Returns whether the action changes or adds the dense feature `at`.
    pub(super) fn changes_dense(&self, at: usize) -> bool {
        match self {
            Self::CopyDense { to, .. } | Self::Score { to, .. } => *to == at,
            Self::Dense { at: changed, .. } => *changed == at,
            _ => false,
        }
    }

    /// Returns whether the action changes the sparse feature `at` of the input batch.
    pub(super) fn changes_sparse(&self, at: SparseAt) -> bool {
        match self {
            Self::Chain { at: changed, .. } | Self::PerRow { at: changed, .. } => *changed == at,
            _ => false,
        }
    }
}

/// An operator that makes a list from two lists.
#[derive(Debug)]
pub(super) enum ListOfPair {
    Product(SigridHash),
    Intersection,
}

/// The actions on batches of one schema.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) layout: FeatureLayout,
    pub(super) actions: Vec<(StepLocation, Action)>,
    pub(super) sampler: Sampler,
}

impl Plan {
    pub(super) fn try_new(config: &PreprocessConfig, schema: &Schema) -> Result<Self> {
        let mut planner = Planner {
            layout: FeatureLayout::new(schema),
            actions: Vec::new(),
            chains: BTreeMap::new(),
            sampler: Sampler::default(),
        };
        for step in &config.steps {
            planner.step(step).map_err(|problem| step.location.error(problem))?;
        }
        while let Some((at, (location, chain))) = planner.chains.pop_first() {
            planner.actions.push((location, Action::Chain { at, chain }));
        }
        Ok(Self { layout: planner.layout, actions: planner.actions, sampler: planner.sampler })
    }
}

struct Planner {
    layout: FeatureLayout,
    actions: Vec<(StepLocation, Action)>,
    /// Pending steps of each feature. They run in one pass as soon as a step of another kind needs the feature.
    chains: BTreeMap<SparseAt, (StepLocation, Chain)>,
    sampler: Sampler,
}

impl Planner {
    fn step(&mut self, step: &Step) -> Checked<()> {
        match &step.op {
            Op::PerValue(op) => self.lists(step, |planner, at| planner.chain(step, at).push(op.clone())),
            Op::Cut(cut) => self.lists(step, |planner, at| planner.chain(step, at).cut(*cut)),
            Op::PerRow(op) => self.lists(step, |planner, at| planner.row(step, at, op.clone())),
            Op::Dense(op) => self.dense(step, op),
            Op::Clamp { min, max } => self.clamp(step, *min, *max),
            Op::FillNull(value) => self.fill_null(step, *value),
            Op::ToId(op) => self.id(step, op),
            Op::LocalHour(zone) => self.local_hour(step, *zone),
            Op::Pair(op) => self.pair(step, op),
            Op::Sampling(sampling) => self.sampling(sampling),
        }
    }

    fn push(&mut self, step: &Step, action: Action) {
        self.actions.push((step.location.clone(), action));
    }

    /// Adds the action for the pending steps of a feature, because the next step needs their result.
    fn flush(&mut self, at: SparseAt) {
        if let Some((location, chain)) = self.chains.remove(&at) {
            self.actions.push((location, Action::Chain { at, chain }));
        }
    }

    fn lists(&mut self, step: &Step, add: impl Fn(&mut Self, SparseAt)) -> Checked<()> {
        self.each(step, Kinds::Sparse, |planner, column| {
            if let Column::Sparse(at) = column {
                add(planner, at);
            }
            Ok(())
        })
    }

    fn dense(&mut self, step: &Step, op: &DenseOp) -> Checked<()> {
        self.each(step, Kinds::Dense, |planner, column| {
            if let Column::Dense(column) = column {
                planner.push(step, Action::Dense { at: column, op: op.clone() });
            }
            Ok(())
        })
    }

    fn clamp(&mut self, step: &Step, min: Option<Number>, max: Option<Number>) -> Checked<()> {
        self.each(step, Kinds::Either, |planner, column| {
            match column {
                Column::Dense(column) => {
                    let min = min.map_or(f32::NEG_INFINITY, Number::real);
                    let op = DenseOp::Clamp { min, max: max.map_or(f32::INFINITY, Number::real) };
                    planner.push(step, Action::Dense { at: column, op });
                }
                Column::Sparse(at) => {
                    let min = min.map_or(Ok(i64::MIN), |min| min.id("min"))?;
                    let max = max.map_or(Ok(i64::MAX), |max| max.id("max"))?;
                    planner.chain(step, at).push(ValueOp::Clamp { min, max });
                }
            }
            Ok(())
        })
    }

    fn fill_null(&mut self, step: &Step, value: Number) -> Checked<()> {
        self.each(step, Kinds::Either, |planner, column| {
            match column {
                Column::Dense(column) => {
                    let op = DenseOp::FillNull { value: value.real() };
                    planner.push(step, Action::Dense { at: column, op });
                }
                Column::Sparse(at) => planner.row(step, at, RowOp::FillEmpty { value: value.id("value")? }),
            }
            Ok(())
        })
    }

    /// Calls `add` for every input of a step whose operator takes one input or, if the step has an `output`, for a copy of
    /// its only input.
    fn each(
        &mut self,
        step: &Step,
        kinds: Kinds,
        mut add: impl FnMut(&mut Self, Column) -> Checked<()>,
    ) -> Checked<()> {
        let columns = self.layout.select(&step.inputs, kinds)?;
        let Some(output) = &step.output else {
            return columns.into_iter().try_for_each(|column| add(self, column));
        };
        let [column] = columns[..] else { return Err(one_input(columns.len())) };
        let copy = match column {
            Column::Dense(from) => {
                let to = self.layout.add_dense(output)?;
                self.push(step, Action::CopyDense { from, to });
                Column::Dense(to)
            }
            Column::Sparse(from) => {
                self.flush(from);
                let to = self.layout.add_sparse(from.group, output, self.layout.kind(from))?;
                self.push(step, Action::Copy { from, name: output.as_str().into() });
                Column::Sparse(to)
            }
        };
        add(self, copy)
    }

    fn chain(&mut self, step: &Step, at: SparseAt) -> &mut Chain {
        &mut self.chains.entry(at).or_insert_with(|| (step.location.clone(), Chain::default())).1
    }

    fn row(&mut self, step: &Step, at: SparseAt, op: RowOp) {
        self.flush(at);
        self.push(step, Action::PerRow { at, op });
    }

    fn id(&mut self, step: &Step, op: &IdOp) -> Checked<()> {
        let columns = self.layout.select(&step.inputs, Kinds::Dense)?;
        let [Column::Dense(from)] = columns[..] else { return Err(one_input(columns.len())) };
        let (group, name) = self.generated_per_sample(step)?;
        self.push(step, Action::ToId { from, group, name, op: op.clone() });
        Ok(())
    }

    fn local_hour(&mut self, step: &Step, zone: Tz) -> Checked<()> {
        let (group, name) = self.generated_per_sample(step)?;
        self.push(step, Action::LocalHour { zone, group, name });
        Ok(())
    }

    fn generated_per_sample(&mut self, step: &Step) -> Checked<(usize, Arc<str>)> {
        let name = step.output.as_deref().unwrap_or_default();
        let group = self.layout.per_sample();
        self.layout.add_sparse(group, name, SparseKind::Sparse)?;
        Ok((group, name.into()))
    }

    fn pair(&mut self, step: &Step, op: &PairOp) -> Checked<()> {
        let [left, right] = &step.inputs[..] else {
            let message =
                format!("`inputs` names {} features, but the operator takes two", step.inputs.len());
            return Err(Problem::new(message, "write `inputs = [\"first\", \"second\"]`"));
        };
        let find = |name: &str| match self.layout.find(name, Kinds::Sparse)? {
            Column::Sparse(at) => Ok(at),
            Column::Dense(_) => {
                Err(Problem::new(format!("`{name}` is a dense feature"), "name sparse features"))
            }
        };
        let (left, right) = (find(left)?, find(right)?);
        self.flush(left);
        self.flush(right);
        let group = self.layout.pair(left.group, right.group);
        let inputs = (left, right);
        let output = step.output.as_deref().unwrap_or_default();
        let list = |op| Action::List { inputs, group, name: output.into(), op };
        let action = match op {
            PairOp::Score(score) => {
                Action::Score { inputs, group, to: self.layout.add_dense(output)?, score: *score }
            }
            PairOp::Cartesian(hash) => {
                self.layout.add_sparse(group, output, SparseKind::Sparse)?;
                list(ListOfPair::Product(*hash))
            }
            PairOp::Intersect => {
                self.layout.add_sparse(group, output, self.layout.kind(left))?;
                list(ListOfPair::Intersection)
            }
        };
        self.push(step, action);
        Ok(())
    }

    fn sampling(&mut self, sampling: &Sampling) -> Checked<()> {
        let label = match &sampling.rates {
            Rates::Every(_) => None,
            Rates::ByLabel { label, .. } => Some(self.layout.label(label)?),
        };
        if sampling.correct_weights {
            self.layout.add_weight()?;
        }
        self.sampler.push(sampling.clone(), label);
        Ok(())
    }
}

fn one_input(count: usize) -> Problem {
    Problem::new(
        format!("`inputs` names {count} features, but there is one `output`"),
        "name one feature, and repeat the step for others",
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{preprocessor, schema};
    use super::*;

    fn sample_schema() -> Schema {
        schema(&[("user", &["user_id", "user_zip"]), ("item", &["item_id"])], false)
    }

    fn refused(steps: &str) -> String {
        preprocessor(steps, &sample_schema()).unwrap_err().to_string()
    }

    fn plan(steps: &str) -> Plan {
        preprocessor(steps, &sample_schema()).unwrap().plan
    }

    #[test]
    fn every_mistake_against_the_schema_is_named() {
        let cases = [
            (
                "op = 'firstx'\ninputs = ['usr_id']\ncount = 1",
                "no feature `usr_id`\n  hint: did you mean `user_id`",
            ),
            ("op = 'firstx'\ninputs = ['users_*']\ncount = 1", "`users_*` matches no feature"),
            (
                "op = 'firstx'\ninputs = ['age']\ncount = 1",
                "`age` is a dense feature, but the operator takes sparse",
            ),
            (
                "op = 'log1p'\ninputs = ['user_id']",
                "`user_id` is a sparse feature, but the operator takes dense",
            ),
            ("op = 'log1p'\ninputs = ['clicked']", "`clicked` is a label, not a feature"),
            (
                "op = 'log1p'\ninputs = ['age']\noutput = 'user_id'",
                "`user_id` is empty, reserved or already used",
            ),
            ("op = 'log1p'\ninputs = ['age']\noutput = 'timestamp'", "`timestamp` is empty, reserved"),
            (
                "op = 'firstx'\ninputs = ['user_id']\ncount = 1\noutput = 'weights'",
                "`weights` is reserved: batches have a column of that name",
            ),
            (
                "op = 'bucketize'\ninputs = ['age']\noutput = 'labels'\nborders = [1]",
                "`labels` is reserved: batches have a column of that name",
            ),
            ("op = 'log1p'\ninputs = ['*']\noutput = 'x'", "names 2 features, but there is one `output`"),
            ("op = 'clamp'\ninputs = ['*']\nmin = 0.5", "`min` is 0.5, but a list holds ids"),
            ("op = 'fill_null'\ninputs = ['user_id']\nvalue = 0.5", "`value` is 0.5, but a list holds ids"),
            ("op = 'bucketize'\ninputs = ['*']\noutput = 'x'\nborders = [1]", "names 2 features"),
            (
                "op = 'id_list_intersect'\ninputs = ['user_id']\noutput = 'x'",
                "names 1 features, but the operator takes two",
            ),
            ("op = 'id_list_intersect'\ninputs = ['user_*', 'item_id']\noutput = 'x'", "no feature `user_*`"),
            (
                "op = 'id_list_intersect'\ninputs = ['age', 'item_id']\noutput = 'x'",
                "`age` is a dense feature",
            ),
            (
                "op = 'sampling'\nlabel = 'click'\nkeep = { '0' = 0.5 }",
                "no label `click`\n  hint: did you mean `clicked`",
            ),
        ];
        for (step, expected) in cases {
            let message = refused(&format!("[[step]]\n{step}"));
            assert!(message.contains(expected), "{step}\n{message}");
            assert!(message.contains("line 2, step 1 (`"), "{message}");
        }
    }

    #[test]
    fn names_that_generated_columns_need_must_be_free() {
        let hour = "[[step]]\nop = 'get_local_hour'\noutput = 'hour'\nzone = 'UTC'";
        let taken = schema(&[("per_sample", &["x"])], false);
        let message = preprocessor(hour, &taken).unwrap_err().to_string();
        assert!(message.contains("the feature group `per_sample` exists already"), "{message}");
        let sampling = "[[step]]\nop = 'sampling'\nrate = 0.5";
        let taken = schema(&[("user", &["sample_weight"])], false);
        let message = preprocessor(sampling, &taken).unwrap_err().to_string();
        assert!(message.contains("`sample_weight`, which is already used"), "{message}");
    }

    #[test]
    fn steps_on_one_feature_are_one_pass() {
        let steps = "
            [[step]]
            op = 'sigrid_hash'
            inputs = ['*']
            max = 100
            [[step]]
            op = 'firstx'
            inputs = ['user_*']
            count = 5
            [[step]]
            op = 'clamp'
            inputs = ['user_id']
            max = 50
            [[step]]
            op = 'log1p'
            inputs = ['age']";
        let plan = plan(steps);
        let chains = plan.actions.iter().filter(|(_, action)| matches!(action, Action::Chain { .. }));
        assert_eq!((chains.count(), plan.actions.len()), (3, 4));
    }

    #[test]
    fn a_step_that_looks_at_a_feature_sees_the_steps_before_and_not_those_after() {
        let hash = "[[step]]\nop = 'sigrid_hash'\ninputs = ['user_id']\nmax = 100\n";
        let copy = "[[step]]\nop = 'firstx'\ninputs = ['user_id']\ncount = 1\noutput = 'x'\n";
        let actions = plan(&format!("{hash}{copy}{hash}")).actions;
        let kinds: Vec<_> = actions
            .iter()
            .map(|(_, action)| match action {
                Action::Chain { at, .. } => format!("chain {}", at.feature),
                Action::Copy { from, .. } => format!("copy {}", from.feature),
                other => format!("{other:?}"),
            })
            .collect();
        assert_eq!(kinds, ["chain 0", "copy 0", "chain 0", "chain 2"]);
    }

    #[test]
    fn only_steps_in_place_change_a_feature() {
        let changes = |steps: &str| {
            let user_id = SparseAt { group: 0, feature: 0 };
            plan(steps).actions.iter().any(|(_, action)| action.changes_sparse(user_id))
        };
        let hash = "[[step]]\nop = 'sigrid_hash'\ninputs = ['user_id']\nmax = 100\n";
        assert!(changes(hash));
        for other in ["output = 'x'\n", ""] {
            let inputs = if other.is_empty() { "['item_id']" } else { "['user_id']" };
            let step = format!("[[step]]\nop = 'firstx'\ninputs = {inputs}\ncount = 1\n{other}");
            assert!(!changes(&step), "{step}");
        }
        assert!(!changes("[[step]]\nop = 'log1p'\ninputs = ['age']"));
        assert!(!changes("[[step]]\nop = 'sampling'\nrate = 0.5"));
    }

    #[test]
    fn globs_see_generated_features() {
        let plan = plan(
            "
            [[step]]
            op = 'cartesian'
            inputs = ['user_id', 'item_id']
            output = 'user_x_item'
            max = 10
            [[step]]
            op = 'firstx'
            inputs = ['user_*']
            count = 1",
        );
        let schema = plan.layout.to_schema();
        assert_eq!(schema.groups[2].name, "user+item");
        assert_eq!(plan.actions.len(), 4);
    }
}
