//! `tasks`: writes random tasks to a directory.

use std::path::Path;

use anyhow::Result;
use onefold_base::units::count_of;
use onefold_sharding::Error;
use onefold_sharding_benchmark::{TABLES_FILE, TaskOptions, tasks};
use onefold_storage::commit::StagedDirectory;
use onefold_terminal::Printer;
use serde_json::json;

use crate::cli::TasksArguments;

pub(crate) fn tasks_command(arguments: &TasksArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.out;
    let staged = new_directory(out)?;
    let options = TaskOptions {
        max_dim: arguments.max_dim,
        memory_bytes: arguments.memory,
        global_batch_size: arguments.global_batch_size,
        ..TaskOptions::new(arguments.tables.clone(), arguments.ranks, arguments.count, arguments.seed)
    };
    let drawn = tasks(&options)?;
    for task in &drawn {
        task.store(staged.path())?;
    }
    staged.commit().map_err(Error::from)?;
    let count: usize = drawn.iter().map(|task| task.tables.tables.len()).sum();
    let text = format!(
        "{} of {:.1} tables on average for {}, written to `{}`",
        count_of(drawn.len() as u64, "task"),
        count as f64 / drawn.len().max(1) as f64,
        count_of(u64::from(options.ranks), "rank"),
        out.display()
    );
    let json = json!({ "tasks": out, "count": drawn.len(), "ranks": options.ranks, "tables": count });
    Ok(printer.summary(&text, &json)?)
}

/// Prepares a directory that must not exist yet, for folders of tasks. It appears as a whole.
pub(crate) fn new_directory(out: &Path) -> Result<StagedDirectory, Error> {
    // No directory of folders has this file, so none is replaced.
    Ok(StagedDirectory::create(out, TABLES_FILE, false)?)
}
