//! Summaries of the commands as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_trainer::metrics::Figures;
use onefold_trainer::{
    Ending, EvaluationSummary, GrownTable, LossJump, ModelSize, PartitionFigures, ProgressiveSummary,
    RowCounts, TrainSummary,
};

use crate::trace_command;

pub(crate) fn size(size: &ModelSize, ranks: u32) -> String {
    format!(
        "{} parameters in tables, {} in the dense part: {} with optimizer state and gradients{}; up to {} to read",
        format_count(size.parameters.embedding),
        format_count(size.parameters.dense),
        format_bytes(size.model_bytes),
        if ranks > 1 { format!(" on rank 0 of {ranks}") } else { String::new() },
        format_bytes(size.reader_bytes),
    )
}

pub(crate) fn run(summary: &TrainSummary, out: &Path, resumes_with: &str) -> String {
    let mut text = format!(
        "{} {}: {} samples in {}, {:.1} s, {} samples/s, {:.1} % waiting for input\n",
        if summary.ended == Ending::Stopped { "stopped" } else { "trained" },
        out.display(),
        format_count(summary.figures.samples),
        count_of(summary.steps, "step"),
        summary.wall_seconds,
        format_count(summary.samples_per_second as u64),
        100.0 * summary.waiting_share,
    );
    let _ = writeln!(
        text,
        "{} parameters in tables, {} in the dense part, {} with optimizer state",
        format_count(summary.parameters.embedding),
        format_count(summary.parameters.dense),
        format_bytes(summary.parameter_bytes),
    );
    if let Some(step) = summary.resumed_from_step {
        let _ = writeln!(text, "resumed from step {}", format_count(step));
    }
    for GrownTable { table, rows_before, rows } in &summary.grown_tables {
        let (before, now) = (format_count(*rows_before), format_count(*rows));
        let _ = writeln!(text, "table {table}: {before} rows before, {now} now");
    }
    if let Some(times) = &summary.rank_times {
        let steps = summary.steps - summary.resumed_from_step.unwrap_or(0);
        let _ =
            writeln!(text, "a step of {} ranks: {}", summary.ranks, trace_command::describe(times, steps));
    }
    match summary.ended {
        Ending::EarlyStopping => text.push_str("stopped early: held-out figures got no better\n"),
        Ending::Stopped => {
            let _ = writeln!(text, "there is a checkpoint; continue with {resumes_with}");
        }
        Ending::Completed | Ending::MaxSteps | Ending::Partitions => {}
    }
    if let Some(step) = summary.model_step.filter(|step| *step != summary.steps) {
        let _ = writeln!(text, "the model is that of step {}, whose figures were best", format_count(step));
    }
    if let Some(RowCounts { in_use, evicted }) = summary.rows {
        let (in_use, evicted) = (format_count(in_use), format_count(evicted));
        let _ = writeln!(text, "table rows: {in_use} in use, {evicted} evicted");
    }
    let factors = summary.dedupe_factor.iter().map(|(group, factor)| format!("{group} {factor:.2}"));
    let _ = writeln!(text, "dedupe factor: {}", factors.collect::<Vec<_>>().join(", "));
    let _ = writeln!(text, "training    {}", line(&summary.figures));
    text.push_str(&tasks(&summary.tasks));
    if let Some(lifetime) = &summary.lifetime {
        let samples = format_count(lifetime.samples);
        let _ = writeln!(text, "lifetime    {}  ({samples} samples over all runs)", line(lifetime));
    }
    if let Some(ProgressiveSummary { figures, partitions }) = &summary.progressive {
        let samples = format_count(figures.samples);
        let _ = writeln!(text, "progressive {}  ({samples} samples)", line(figures));
        for of in partitions {
            let PartitionFigures { loss, ne, auc, calibration, rmse, .. } = *of;
            let figures = Figures { loss, ne, auc, calibration, rmse, ..Figures::default() };
            let _ = writeln!(
                text,
                "  {}: {}  ({} samples)",
                of.partition,
                line(&figures),
                format_count(of.samples)
            );
        }
    }
    if let Some(eval) = &summary.eval {
        text.push_str(&evaluation(eval));
    }
    if let Some(LossJump { step, before, loss }) = summary.loss_jump {
        let _ = writeln!(
            text,
            "warning: the loss jumped from {before:.4} to {loss:.4} at step {}; try a lower `learning_rate`, a warm-up \
             under `[schedule]`, or `max_grad_norm` under `[optimizer.dense]`",
            format_count(step)
        );
    }
    // Held-out samples are the better measure. The training metrics include predictions from before the model
    // has learned.
    let ne = summary.eval.as_ref().map_or(summary.figures.ne, |eval| eval.figures.ne);
    if let Some(ne) = ne.filter(|ne| *ne > 1.0) {
        let _ = writeln!(
            text,
            "warning: NE is {ne:.4}, and above 1 the mean label predicts better than the model; try a lower `learning_rate`, \
             `eps = 1e-2` under `[optimizer.tables]`, a warm-up under `[schedule]`, or more steps"
        );
    }
    text
}

/// Returns one line per task.
fn tasks(tasks: &BTreeMap<String, Figures>) -> String {
    tasks.iter().map(|(task, figures)| format!("  {task}: {}\n{}", line(figures), ranking(figures))).collect()
}

/// Returns a line with the ranking metrics, or an empty string if there are none.
fn ranking(figures: &Figures) -> String {
    let Some(ranking) = &figures.ranking else { return String::new() };
    let values = ranking.figures.iter().map(|(name, value)| format!("{name} {value:.4}  "));
    let without = match ranking.samples_without_group {
        0 => String::new(),
        samples => format!(", {} samples belong to none", format_count(samples)),
    };
    format!("  ranking   {}({} groups{without})\n", values.collect::<String>(), format_count(ranking.groups))
}

pub(crate) fn evaluation(summary: &EvaluationSummary) -> String {
    let mut text =
        format!("evaluation  {}  ({} samples", line(&summary.figures), format_count(summary.figures.samples));
    if let Some(rate) = summary.samples_per_second {
        let _ = write!(text, ", {} samples/s", format_count(rate as u64));
    }
    text.push_str(")\n");
    text.push_str(&ranking(&summary.figures));
    text.push_str(&tasks(&summary.tasks));
    for (feature, segments) in &summary.segments {
        for (segment, tasks) in segments {
            for (task, figures) in tasks {
                let task = if tasks.len() > 1 { format!(" {task}") } else { String::new() };
                let (figures, samples) = (line(figures), format_count(figures.samples));
                let _ = writeln!(text, "  {feature} {segment}{task}: {figures}  ({samples} samples)");
            }
        }
    }
    text
}

fn line(figures: &Figures) -> String {
    let values = [
        ("loss", figures.loss),
        ("ne", figures.ne),
        ("auc", figures.auc),
        ("calibration", figures.calibration),
    ];
    let binary = figures.rmse.is_none();
    let mut values: Vec<_> = values.into_iter().filter(|(name, _)| binary || *name == "loss").collect();
    if !binary {
        values.extend([("rmse", figures.rmse), ("mae", figures.mae), ("r2", figures.r2)]);
        values.extend(figures.deviance.map(|deviance| ("deviance", Some(deviance))));
    }
    values.into_iter().map(|(name, value)| format!("{name} {}", figure(value))).collect::<Vec<_>>().join("  ")
}

fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "n/a".to_owned(), |value| format!("{value:.4}"))
}
