//! Placement tasks like those of NeuroShard's benchmark: tables of the pool with random dimensions, and ranks.

use std::ops::RangeInclusive;
use std::path::Path;

use onefold_base::fault::{option, text};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use onefold_sharding::{
    Error, Lookups, Result, Shard, ShardLoad, Table, TableFile, TableOptimizer, Topology,
};

use crate::pool::{PoolTable, pool};

/// Options for drawing tasks.
#[derive(Debug, Clone)]
pub struct TaskOptions {
    /// The range of the number of tables in a task, which is drawn uniformly.
    pub tables: RangeInclusive<usize>,
    /// The number of ranks.
    pub ranks: u32,
    /// The largest dimension. Dimensions are 4, 8, 16, … up to this value.
    pub max_dim: u64,
    /// The number of tasks.
    pub count: usize,
    /// The seed of the random choices.
    pub seed: u64,
    /// The memory of a rank, in bytes.
    pub memory_bytes: u64,
    /// The number of samples per step over all ranks.
    pub global_batch_size: u64,
}

impl TaskOptions {
    /// Returns options with NeuroShard's 4 GiB per rank and 65,536 samples per step.
    pub fn new(tables: RangeInclusive<usize>, ranks: u32, count: usize, seed: u64) -> Self {
        Self { tables, ranks, max_dim: 128, count, seed, memory_bytes: 4 << 30, global_batch_size: 65_536 }
    }
}

/// Tables, and the ranks on which to place them.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The name of the task's directory.
    pub name: String,
    /// The tables.
    pub tables: TableFile,
    /// The ranks.
    pub topology: Topology,
}

/// The smallest dimension of a table.
const MIN_DIM: u64 = 4;
/// The number of draws for one task, in tables, after which drawing fails.
const MAX_DRAWS: usize = 100_000;
/// The largest share of the total memory that tables and buffers take: 15 GB of 4 × 4 GB in NeuroShard's benchmark.
const MAX_FILL: (u64, u64) = (15, 16);

/// The memory bandwidth of the RTX 2080 Ti, on which NeuroShard's benchmark ran, in bytes per second (data sheet).
const MEMORY_BANDWIDTH: f64 = 6.16e11;
/// The bandwidth between these GPUs over PCIe, in bytes per second, derived from NeuroShard's communication times.
const EXCHANGE_BANDWIDTH: f64 = 4.5e9;

/// Draws tasks. For each task, tables are drawn from the pool with replacement, each with a dimension that is uniform
/// over the powers of two from 4. A task whose tables and buffers take more than 15/16 of the total memory is drawn
/// again.
///
/// # Errors
///
/// [`Error::Invalid`] for options that allow no task: no tables or ranks, a `max_dim` below 4, a batch whose samples
/// cannot be divided evenly among the ranks, or tables that never fit.
pub fn tasks(options: &TaskOptions) -> Result<Vec<Task>> {
    let topology = topology(options)?;
    let dims: Vec<u64> = std::iter::successors(Some(MIN_DIM), |dim| dim.checked_mul(2))
        .take_while(|dim| *dim <= options.max_dim)
        .collect();
    let (least, most) = (*options.tables.start(), *options.tables.end());
    if dims.is_empty() {
        let message = text![option("max_dim"), format!(" is {}", options.max_dim)];
        return Err(Error::invalid(message, "the smallest dimension of a task is 4"));
    }
    if least == 0 || least > most {
        return Err(Error::invalid(
            text![option("tables"), format!(" is {least}-{most}")],
            "give a number, or a range like 10-60",
        ));
    }
    let batch_size = options.global_batch_size / u64::from(options.ranks);
    if batch_size * u64::from(options.ranks) != options.global_batch_size || batch_size == 0 {
        let message =
            format!("{} samples do not divide over {} ranks", options.global_batch_size, options.ranks);
        let hint = text!["give a number of ranks, or of ", option("global_batch_size"), ", that does"];
        return Err(Error::invalid(message, hint));
    }
    let pool = pool();
    let width = (options.count.max(2) - 1).to_string().len().max(3);
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let mut tasks = Vec::with_capacity(options.count);
    for i in 0..options.count {
        let tables = draw(&mut rng, &pool, &dims, options, &topology, batch_size)?;
        let name = format!("task-{i:0width$}");
        tasks.push(Task {
            name,
            tables: TableFile::new(options.global_batch_size, tables)?,
            topology: topology.clone(),
        });
    }
    Ok(tasks)
}

fn topology(options: &TaskOptions) -> Result<Topology> {
    let topology = Topology {
        ranks_per_node: options.ranks,
        memory_bandwidth_bytes_per_second: MEMORY_BANDWIDTH,
        intra_node_bandwidth_bytes_per_second: EXCHANGE_BANDWIDTH,
        inter_node_bandwidth_bytes_per_second: EXCHANGE_BANDWIDTH,
        ranks: options.ranks,
        ..Topology::h100(1, options.memory_bytes)?
    };
    topology.validate()?;
    Ok(topology)
}

fn draw(
    rng: &mut ChaCha8Rng,
    pool: &[PoolTable],
    dims: &[u64],
    options: &TaskOptions,
    topology: &Topology,
    batch_size: u64,
) -> Result<Vec<Table>> {
    let memory = u128::from(topology.memory_bytes) * u128::from(topology.ranks);
    let limit = memory * u128::from(MAX_FILL.0) / u128::from(MAX_FILL.1);
    let mut drawn = 0;
    while drawn < MAX_DRAWS {
        let count = rng.random_range(options.tables.clone());
        let mut bytes = 0;
        let mut tables = Vec::with_capacity(count);
        for i in 0..count {
            let source = &pool[rng.random_range(0..pool.len())];
            let table = table(i, source, dims[rng.random_range(0..dims.len())]);
            let shard = Shard::whole(&table, 0);
            let buffers = ShardLoad::table_wise(&table, &shard, topology, batch_size).buffers();
            let asking = u128::from(buffers.asking) * u128::from(topology.ranks);
            bytes += u128::from(table.memory_bytes()?) + u128::from(buffers.serving) + asking;
            tables.push(table);
        }
        if bytes <= limit {
            return Ok(tables);
        }
        drawn += count;
    }
    let (least, most) = (options.tables.start(), options.tables.end());
    Err(Error::invalid(
        format!(
            "{least} to {most} tables of dimensions up to {} rarely fit {} ranks of {}",
            options.max_dim,
            topology.ranks,
            onefold_base::units::format_bytes(topology.memory_bytes)
        ),
        text![
            "give fewer tables or more ranks, lower ",
            option("max_dim"),
            ", or raise ",
            option("memory_bytes")
        ],
    ))
}

/// Returns a table as NeuroShard trains it: `fp32`, SGD without state.
fn table(i: usize, source: &PoolTable, dim: u64) -> Table {
    Table {
        optimizer: TableOptimizer::Sgd,
        first: Lookups {
            pooling_factor: source.pooling_factor,
            access_bins: Some(source.accesses),
            ..Lookups::default()
        },
        ..Table::new(format!("table_{i}"), source.rows, dim)
    }
}

/// The name of the file with a task's tables.
pub const TABLES_FILE: &str = "tables.json";
/// The name of the file with a task's topology.
pub const TOPOLOGY_FILE: &str = "topology.json";

impl Task {
    /// Writes the task's directory into the existing `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the directory or a file cannot be written.
    pub fn store(&self, directory: &Path) -> Result<()> {
        let folder = directory.join(&self.name);
        fs_err::create_dir(&folder)?;
        self.tables.store(&folder.join(TABLES_FILE))?;
        self.topology.store(&folder.join(TOPOLOGY_FILE))
    }

    /// Reads all tasks in `directory`, ordered by name. A task is a subdirectory with a `tables.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the directory has no tasks, or if a file of a task is missing or invalid.
    pub fn load_all(directory: &Path) -> Result<Vec<Self>> {
        let hint = "make some with `onefold-evaluate-plans tasks --tables 10-60 --ranks 4 --count 100 --seed 1 --out DIR`";
        let wrong = |message: &str| Error::file(directory, message, hint);
        if !directory.is_dir() {
            return Err(wrong("there is no such directory of tasks"));
        }
        let mut folders = Vec::new();
        for entry in fs_err::read_dir(directory)? {
            let path = entry?.path();
            if path.join(TABLES_FILE).is_file() {
                folders.push(path);
            }
        }
        folders.sort();
        if folders.is_empty() {
            return Err(wrong("no folder in it holds a `tables.json`"));
        }
        let task = |folder: &std::path::PathBuf| {
            let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
            Ok(Self {
                name: name.unwrap_or_default(),
                tables: TableFile::load(&folder.join(TABLES_FILE))?,
                topology: Topology::load(&folder.join(TOPOLOGY_FILE))?,
            })
        };
        folders.iter().map(task).collect()
    }
}

#[cfg(test)]
mod tests {
    use onefold_sharding::{AnalyticCost, Beam, CostModel, LearnedCosts, ModelFile, Search};

    use super::*;

    #[test]
    fn tasks_are_what_was_asked_for_and_depend_on_the_seed() {
        let options = TaskOptions { max_dim: 32, ..TaskOptions::new(10..=60, 4, 20, 1) };
        let drawn = tasks(&options).unwrap();
        assert_eq!(drawn.len(), 20);
        for task in &drawn {
            assert!((10..=60).contains(&task.tables.tables.len()));
            assert!(task.tables.tables.iter().all(|table| [4, 8, 16, 32].contains(&table.dim)));
            let bytes: u64 = task.tables.tables.iter().map(|table| table.memory_bytes().unwrap()).sum();
            assert!(bytes <= 15 << 30, "{bytes}");
            assert_eq!((task.tables.global_batch_size, task.topology.ranks_per_node), (65_536, 4));
        }
        assert_eq!(tasks(&options).unwrap(), drawn);
        assert_ne!(tasks(&TaskOptions { seed: 2, ..options }).unwrap(), drawn);
    }

    #[test]
    fn tasks_that_cannot_be_are_refused() {
        let refused = |change: fn(&mut TaskOptions)| {
            let mut options = TaskOptions::new(10..=20, 4, 1, 1);
            change(&mut options);
            tasks(&options).unwrap_err().to_string()
        };
        assert!(
            refused(|options| options.tables = 0..=3).starts_with("the option `tables` is 0-3\n  hint: ")
        );
        assert!(refused(|options| options.max_dim = 3).starts_with("the option `max_dim` is 3\n  hint: "));
        assert!(refused(|options| options.ranks = 3).contains("samples do not divide over 3 ranks"));
        assert!(refused(|options| options.ranks = 0).contains("`ranks` is 0"));
        assert!(refused(|options| options.memory_bytes = 1000).contains("rarely fit 4 ranks of 1000 B"));
    }

    #[test]
    fn folders_are_loaded_as_stored() {
        let directory = tempfile::tempdir().unwrap();
        let drawn = tasks(&TaskOptions::new(10..=20, 4, 3, 1)).unwrap();
        for task in &drawn {
            task.store(directory.path()).unwrap();
        }
        let loaded = Task::load_all(directory.path()).unwrap();
        assert_eq!(loaded.len(), 3);
        assert_eq!(loaded[2].name, "task-002");
        assert_eq!(loaded[2].tables.tables.len(), drawn[2].tables.tables.len());
        let empty = tempfile::tempdir().unwrap();
        assert!(Task::load_all(empty.path()).unwrap_err().to_string().contains("no folder in it holds"));
        fs_err::remove_file(directory.path().join("task-001/topology.json")).unwrap();
        assert!(Task::load_all(directory.path()).unwrap_err().to_string().contains("task-001/topology.json"));
    }

    #[test]
    fn plans_do_not_depend_on_threads() {
        let options = TaskOptions { max_dim: 64, ..TaskOptions::new(40..=40, 8, 1, 11) };
        let task = tasks(&options).unwrap().remove(0);
        let learned =
            LearnedCosts::new(vec![ModelFile::shipped("cpu").unwrap()], &task.topology, true).unwrap();
        for model in [&AnalyticCost as &dyn CostModel, &learned] {
            let planned = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let Task { tables, topology, .. } = &task;
                pool.install(|| Beam::Full.plan(&tables.tables, topology, model, tables.global_batch_size))
                    .unwrap()
            };
            assert_eq!(planned(1), planned(5), "{}", model.id());
        }
    }
}
