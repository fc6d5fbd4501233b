//! `[[tasks]]`: the labels that the model predicts.

use onefold_datasets::{Schema, suggest};
use serde::{Deserialize, Serialize};

use super::{Error, Loss, Result, TrainConfig, WatchedMetric};

/// An entry of `[[tasks]]`: one of several labels that the model predicts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskConfig {
    /// The name of the label.
    pub label: String,
    /// The factor on the task's loss in the sum of all losses.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: f64,
    /// The loss function.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub loss: Loss,
}

impl TaskConfig {
    /// Returns a task with binary cross-entropy and weight 1.
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), weight: one(), loss: Loss::default() }
    }
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(weight: &f64) -> bool {
    *weight == 1.0
}

impl TrainConfig {
    /// Returns the tasks of the model, in the order of its logits: the `[[tasks]]`, or the one task of
    /// `[data].label`.
    pub fn all_tasks(&self) -> Vec<TaskConfig> {
        match &self.data.label {
            Some(label) => vec![TaskConfig { loss: self.data.loss, ..TaskConfig::new(label) }],
            None => self.tasks.clone(),
        }
    }

    /// Returns the tasks of the model, each with the column of its label in `schema`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the schema lacks a label.
    pub fn tasks_of(&self, schema: &Schema) -> Result<Vec<(TaskConfig, usize)>> {
        let with_column = |task: TaskConfig| {
            let label = &task.label;
            if let Some(column) = schema.labels.iter().position(|known| known == label) {
                return Ok((task, column));
            }
            Err(Error::config(
                &self.path,
                match &self.data.label {
                    Some(_) => format!("`[data].label` is `{label}`, which is no label of the dataset"),
                    None => format!("`[[tasks]]` has the label `{label}`, which is no label of the dataset"),
                },
                suggest(label, schema.labels.iter().map(String::as_str)),
            ))
        };
        self.all_tasks().into_iter().map(with_column).collect()
    }
}

/// Rejects invalid tasks.
pub(super) fn check(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let tasks = &config.tasks;
    match &config.data.label {
        Some(_) if !tasks.is_empty() => {
            return Err((
                "`[data].label` and `[[tasks]]` are both given".to_owned(),
                "give the one label in `[data]`, or all of them in `[[tasks]]`",
            ));
        }
        None if tasks.is_empty() => {
            return Err((
                "`[data].label` is missing".to_owned(),
                "name the label that is predicted, or give several in `[[tasks]]`",
            ));
        }
        None if config.data.loss != Loss::default() => {
            return Err((
                "`[data].loss` is given, but the labels are in `[[tasks]]`".to_owned(),
                "give `loss` under each of `[[tasks]]`",
            ));
        }
        _ => {}
    }
    for (i, task) in tasks.iter().enumerate() {
        if tasks[..i].iter().any(|other| other.label == task.label) {
            let message = format!("`[[tasks]]` has the label `{}` twice", task.label);
            return Err((message, "give every label once, with the weight that its loss should have"));
        }
        if !(task.weight.is_finite() && task.weight > 0.0) {
            let message = format!("`[[tasks]]` has the weight {} for `{}`", task.weight, task.label);
            return Err((message, "give a positive weight, or leave the task out"));
        }
    }
    check_output(config)?;
    check_watched(config)
}

/// Checks that the top MLP has one output per task.
fn check_output(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let (widths, tasks) = (&config.model.top_mlp, config.all_tasks().len());
    let fits = widths.iter().all(|width| *width > 0)
        && widths.last().and_then(|width| usize::try_from(*width).ok()) == Some(tasks);
    match (fits, tasks) {
        (true, _) => Ok(()),
        (false, 1) => Err((
            format!("`[model].top_mlp` is {widths:?}"),
            "all widths must be positive, and the last must be 1; several labels are given in `[[tasks]]`",
        )),
        (false, _) => Err((
            format!("`[model].top_mlp` is {widths:?}, but there are {tasks} tasks"),
            "all widths must be positive, and the last must be the number of tasks",
        )),
    }
}

/// Checks that the task of early stopping exists and has the watched metric.
fn check_watched(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let Some(watched) = config.early_stopping.as_ref() else { return Ok(()) };
    let tasks = config.all_tasks();
    let found = match &watched.task {
        Some(task) => tasks.iter().find(|known| known.label == *task),
        None => tasks.first(),
    };
    let Some(found) = found else {
        let task = watched.task.as_deref().unwrap_or_default();
        let message = format!("`[early_stopping].task` is `{task}`, which is no task of the model");
        return Err((message, "name the label of a task, or leave it out to watch the first task"));
    };
    if found.loss != Loss::default() && watched.metric != WatchedMetric::Loss {
        let message = format!(
            "`[early_stopping]` watches a figure of binary tasks, and `{}` is not binary",
            found.label
        );
        return Err((message, "set `metric = \"loss\"` there"));
    }
    Ok(())
}
