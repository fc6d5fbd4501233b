//! `onefold-shard show`, `diff` and `export`: print, compare and export plans.

use std::fmt::Write;

use anyhow::Result;
use onefold_base::units::{count_of, format_count};
use onefold_sharding::torchrec::{self, Module};
use onefold_sharding::{Plan, ShardingType, TableChange, claim_output, diff};
use onefold_storage::commit;
use onefold_terminal::Printer;
use serde_json::json;

use crate::cli::{DiffArguments, ExportArguments, ShowArguments};
use crate::page::html;
use crate::{plan_figures, rank_table};

/// The number of tables that a summary lists.
const LISTED: usize = 24;

pub(crate) fn show(arguments: &ShowArguments, printer: &Printer) -> Result<()> {
    if let Some(out) = &arguments.html {
        claim_output(out, arguments.overwrite)?;
    }
    let plan = Plan::load(&arguments.plan)?;
    let mut text = rank_table(&plan);
    let explained: Vec<_> =
        plan.tables.iter().filter_map(|table| Some((table, table.reason.as_ref()?))).collect();
    if !explained.is_empty() {
        text.push_str("\n\nWhy large tables are where they are:");
    }
    for (table, reason) in explained.iter().take(LISTED) {
        let _ = write!(text, "\n  {} ({} × {}): {reason}", table.name, format_count(table.rows), table.dim);
    }
    let mut json = plan_figures(&plan);
    if let Some(out) = &arguments.html {
        commit::write_atomically(out, html(&plan).as_bytes())?;
        let _ = write!(text, "\n\nPage written to `{}`", out.display());
        json["html"] = json!(out);
    }
    json["rank_predictions"] = serde_json::to_value(&plan.ranks)?;
    Ok(printer.summary(&text, &json)?)
}

pub(crate) fn diff_command(arguments: &DiffArguments, printer: &Printer) -> Result<()> {
    let (before, after) = (Plan::load(&arguments.before)?, Plan::load(&arguments.after)?);
    let found = diff(&before, &after);
    let (first, second) = found.max_cost_ms;
    let mut text = format!(
        "{} placed differently, {} as before\nPredicted cost: {first:.4} ms by {}, then {second:.4} ms by {}",
        count_of(found.changes.len() as u64, "table"),
        format_count(found.unchanged as u64),
        before.cost_model,
        after.cost_model,
    );
    if before.cost_model != after.cost_model || before.global_batch_size != after.global_batch_size {
        text.push_str("\nThe costs are of different models or batch sizes: do not compare them");
    }
    let none = || "not there".to_owned();
    for change in &found.changes {
        let _ = write!(
            text,
            "\n  {}: {} → {}",
            change.table,
            change.before.clone().unwrap_or_else(none),
            change.after.clone().unwrap_or_else(none)
        );
    }
    let moved: u128 = found.changes.iter().map(|change| change.moved_elements).sum();
    let change = |change: &TableChange| {
        json!({
            "table": change.table,
            "before": change.before,
            "after": change.after,
            "moved_elements": u64::try_from(change.moved_elements).unwrap_or(u64::MAX),
        })
    };
    let json = json!({
        "unchanged": found.unchanged,
        "changed": found.changes.len(),
        "moved_elements": u64::try_from(moved).unwrap_or(u64::MAX),
        "before_max_cost_ms": first,
        "after_max_cost_ms": second,
        "changes": found.changes.iter().map(change).collect::<Vec<_>>(),
    });
    Ok(printer.summary(&text, &json)?)
}

pub(crate) fn export(arguments: &ExportArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let plan = Plan::load(&arguments.plan)?;
    let modules = match &arguments.module[..] {
        [] => vec![Module::of_all("")],
        given => given.to_vec(),
    };
    let exported = torchrec::export(&plan, &modules, &arguments.device)?;
    let copied = plan.tables.iter().filter(|table| table.sharding_type == ShardingType::DataParallel);
    let copied: Vec<&str> = copied.map(|table| table.name.as_str()).collect();
    if !copied.is_empty() {
        printer.remark(&format!(
            "TorchRec cannot look up a deduplicated KeyedJaggedTensor in tables that it copies ({}): give it \
             `to_kjt(batch, deduplicated=False)`",
            copied.join(", ")
        ));
    }
    let mut text = serde_json::to_string_pretty(&exported)?;
    text.push('\n');
    commit::write_atomically(out, text.as_bytes())?;
    let summary = format!(
        "{} for {} of TorchRec, in {}, written to `{}`",
        count_of(plan.tables.len() as u64, "table"),
        count_of(u64::from(plan.topology.ranks), "rank"),
        count_of(modules.len() as u64, "module"),
        out.display()
    );
    let json = json!({ "torchrec": out, "tables": plan.tables.len(), "ranks": plan.topology.ranks });
    Ok(printer.summary(&summary, &json)?)
}
