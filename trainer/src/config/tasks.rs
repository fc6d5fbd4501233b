//! `[[tasks]]`: what the model predicts.

use onefold_datasets::{Schema, suggest};
use serde::{Deserialize, Serialize};

use super::TrainConfig;
use crate::metrics::Task;
use crate::{Error, Result};

/// One of `[[tasks]]`: a label that the model predicts beside others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskConfig {
    /// The label.
    pub label: String,
    /// What the task's loss is multiplied by before the losses are summed.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_one(weight: &f64) -> bool {
    *weight == 1.0
}

impl TrainConfig {
    /// The tasks of the model, in the order of its logits: those of `[[tasks]]`, or that of `[data].label`.
    pub fn all_tasks(&self) -> Vec<TaskConfig> {
        match &self.data.label {
            Some(label) => vec![TaskConfig { label: label.clone(), weight: one() }],
            None => self.tasks.clone(),
        }
    }

    /// The tasks of the model with their columns among the labels of `schema`, and the weights of their losses.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a label that the schema does not have.
    pub(crate) fn check_labels(&self, schema: &Schema) -> Result<Vec<(Task, f64)>> {
        let known = |TaskConfig { label, weight }: TaskConfig| match Task::of(schema, &[label.as_str()]).pop()
        {
            Some(task) => Ok((task, weight)),
            None => Err(Error::Config {
                path: self.path.clone(),
                message: match &self.data.label {
                    Some(_) => format!("`[data].label` is `{label}`, which is no label of the dataset"),
                    None => format!("`[[tasks]]` has the label `{label}`, which is no label of the dataset"),
                },
                hint: suggest(&label, schema.labels.iter().map(String::as_str)),
            }),
        };
        self.all_tasks().into_iter().map(known).collect()
    }
}

/// Refuses tasks that no model can have.
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

/// The top MLP has an output for every task.
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

/// Early stopping watches a task that there is.
fn check_watched(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let Some(watched) = config.early_stopping.as_ref() else { return Ok(()) };
    let Some(task) = &watched.task else { return Ok(()) };
    if config.all_tasks().iter().any(|known| known.label == *task) {
        return Ok(());
    }
    let message = format!("`[early_stopping].task` is `{task}`, which is no task of the model");
    Err((message, "name the label of a task, or leave it out to watch the first task"))
}
