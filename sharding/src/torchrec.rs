//! Import of TorchRec's embedding configurations, and export of a plan from which TorchRec's `ShardingPlan` is built.
//!
//! The input is JSON with the fields of `EmbeddingBagConfig`. A table may also have `pooling_factors` as in
//! `ParameterConstraints`, one for each feature:
//!
//! ```json
//! {"global_batch_size": 512, "optimizer": "row_wise_adagrad", "tables": [
//!   {"name": "t_user", "num_embeddings": 1000000, "embedding_dim": 64, "feature_names": ["user_id"],
//!    "pooling": "SUM", "data_type": "FP32", "pooling_factors": [1.0]}]}
//! ```
//!
//! `dedupe_factor` and `access_bins` apply to each feature of a table.
//!
//! The output is described at [`export`].

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::access::AccessBins;
use crate::error::{Error, Result};
use crate::lookups::{FeatureLookups, Lookups};
use crate::plan::{Plan, Shard, ShardingType, TablePlan};
use crate::search::problem::COLUMN_STEP;
use crate::table::{Table, TableFile, row_blocks};
use crate::{DataType, Pooling, TableOptimizer, files};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    global_batch_size: u64,
    #[serde(default)]
    optimizer: TableOptimizer,
    tables: Vec<BagConfig>,
}

/// An `EmbeddingBagConfig`, with additional fields for planning.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BagConfig {
    name: String,
    num_embeddings: u64,
    embedding_dim: u64,
    feature_names: Vec<String>,
    #[serde(default = "sum")]
    pooling: String,
    #[serde(default = "fp32")]
    data_type: String,
    #[serde(default)]
    pooling_factors: Option<Vec<f64>>,
    #[serde(default)]
    dedupe_factor: Option<f64>,
    #[serde(default)]
    access_bins: Option<AccessBins>,
}

fn sum() -> String {
    "SUM".to_owned()
}

fn fp32() -> String {
    "FP32".to_owned()
}

/// Reads tables from JSON with TorchRec's field names.
///
/// # Errors
///
/// [`Error::Fault`] if the file is missing or malformed, a table has no feature, the number of pooling factors
/// differs from the number of features, or a data type or pooling is not supported.
pub fn load_tables(path: &Path) -> Result<TableFile> {
    let shape = "write {\"global_batch_size\": N, \"tables\": [{\"name\", \"num_embeddings\", \"embedding_dim\", \"feature_names\", …}]}, \
                 the fields of `EmbeddingBagConfig`";
    let bytes = files::read(path, shape)?;
    let model: Model = serde_json::from_slice(&bytes).map_err(|error| {
        let other = files::of_another_kind(&bytes, files::TORCHREC_TABLES);
        Error::file(path, other.unwrap_or_else(|| error.to_string()), shape)
    })?;
    let tables = model.tables.into_iter().map(|config| table(config, model.optimizer));
    let tables = tables.collect::<Result<Vec<_>>>().map_err(|error| error.in_file(path))?;
    TableFile::new(model.global_batch_size, tables).map_err(|error| error.in_file(path))
}

fn table(config: BagConfig, optimizer: TableOptimizer) -> Result<Table> {
    let name = &config.name;
    let [first, further @ ..] = &config.feature_names[..] else {
        let message = format!("table `{name}` has no feature");
        return Err(Error::invalid(message, "name the features that look it up in `feature_names`"));
    };
    let pooling = match config.pooling.as_str() {
        "SUM" => Pooling::Sum,
        "MEAN" => Pooling::Mean,
        // An `EmbeddingCollection` returns one vector per id, as attention needs them.
        "NONE" => Pooling::Attention,
        other => {
            let message = format!("table `{name}` has the pooling `{other}`");
            return Err(Error::invalid(message, "give SUM, MEAN or NONE"));
        }
    };
    let dtype = match config.data_type.as_str() {
        "FP32" => DataType::Fp32,
        "FP16" => DataType::Fp16,
        "BF16" => DataType::Bf16,
        other => {
            let message = format!("table `{name}` has the data type `{other}`");
            return Err(Error::invalid(message, "give FP32, FP16 or BF16"));
        }
    };
    let features = config.feature_names.len();
    // TorchRec's default is 1.
    let factors = config.pooling_factors.unwrap_or_else(|| vec![1.0; features]);
    if factors.len() != features {
        let message =
            format!("table `{name}` has {} pooling factors, and its features are {features}", factors.len());
        return Err(Error::invalid(message, "give one for each: the mean number of its ids per sample"));
    }
    let (dedupe_factor, access_bins) = (config.dedupe_factor.unwrap_or(1.0), config.access_bins);
    let lookups =
        |pooling_factor: f64| Lookups { pooling, dedupe_factor, access_bins, ..Lookups::of(pooling_factor) };
    let further = further.iter().zip(&factors[1..]).map(|(feature, pooling_factor)| FeatureLookups {
        feature: feature.clone(),
        lookups: lookups(*pooling_factor),
    });
    Ok(Table {
        torchrec_name: Some(name.clone()),
        feature: (first != name).then(|| first.clone()),
        dtype,
        optimizer,
        first: lookups(factors[0]),
        further_features: further.collect(),
        ..Table::new(config.name, config.num_embeddings, config.embedding_dim)
    })
}

/// Returns the name of a table in TorchRec, for exported models and plans: `t_TABLE`. TorchRec's modules have the
/// tables as attributes, so names such as `items` are reserved, and a name cannot contain a dot.
pub fn table_name(table: &str) -> String {
    format!("t_{}", table.replace('.', "_"))
}

/// An embedding collection of a model, and its tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The path of the collection in the model; empty if the collection is the model.
    pub path: String,
    /// The names of the tables, as in the plan. If it is empty, the module has all tables that no other module has.
    pub tables: Vec<String>,
}

impl Module {
    /// Returns a module with all tables.
    pub fn of_all(path: impl Into<String>) -> Self {
        Self { path: path.into(), tables: Vec::new() }
    }
}

/// Exports a plan as JSON from which TorchRec's `ShardingPlan` is built. For every module and table, it contains the
/// fields of `ParameterSharding`: `sharding_type`, `compute_kernel`, `ranks`, and the `sharding_spec` as a list of
/// `shard_offsets`, `shard_sizes` and `placement`, or null for data-parallel tables.
///
/// `device` is `cuda` or `cpu`. A row-wise table on the ranks of one machine of several has TorchRec's type
/// `table_row_wise`.
///
/// # Errors
///
/// [`Error::Invalid`] for plans that TorchRec cannot represent: blocks of rows that are not equal, or not in order on
/// all ranks or on the ranks of one machine; shards, other than copies, whose number of columns is not a multiple of
/// 4; and names of modules and tables that PyTorch rejects. Also if a table is in no module or in two modules, or if
/// a module has a table that the plan lacks.
pub fn export(plan: &Plan, modules: &[Module], device: &str) -> Result<Value> {
    let mut exported = Map::new();
    for module in modules {
        check_module(plan, module, modules)?;
        exported.insert(module.path.clone(), Value::Object(Map::new()));
    }
    let mut names = HashSet::new();
    for table in &plan.tables {
        let module = module_of(table, modules)?;
        let name = table.torchrec_name.clone().unwrap_or_else(|| table_name(&table.name));
        if name.is_empty() || name.contains('.') || !names.insert(name.clone()) {
            let message = format!("table `{}` would be `{name}` in TorchRec", table.name);
            let hint = "names of TorchRec's tables are not empty, have no dot, and differ: correct its name, or its \
                        `torchrec_name`, in the tables' file";
            return Err(Error::invalid(message, hint));
        }
        let sharding = parameter_sharding(plan, table, device)?;
        if let Some(Value::Object(tables)) = exported.get_mut(&module.path) {
            tables.insert(name, sharding);
        }
    }
    Ok(json!({
        "format_version": 1,
        "world_size": plan.topology.ranks,
        "local_world_size": plan.topology.ranks_per_node,
        "plan": exported,
    }))
}

fn check_module(plan: &Plan, module: &Module, modules: &[Module]) -> Result<()> {
    let path = &module.path;
    let is_name = |part: &str| {
        let mut letters = part.chars();
        letters.next().is_some_and(|first| first.is_alphanumeric() || first == '_')
            && letters.all(|letter| letter.is_alphanumeric() || letter == '_')
    };
    if !path.is_empty() && !path.split('.').all(is_name) {
        let hint =
            "give the names of modules with dots between them, as `sparse_arch.embedding_bag_collection`";
        return Err(Error::invalid(format!("`{path}` is not the path of a module"), hint));
    }
    let same = modules.iter().filter(|other| other.path == *path).count();
    let rest = modules.iter().filter(|other| other.tables.is_empty()).count();
    if same > 1 || (rest > 1 && module.tables.is_empty()) {
        let message =
            if same > 1 { "is given twice" } else { "and another module would both have all tables" };
        let hint = "give each module once, and name the tables of all modules but one";
        return Err(Error::invalid(format!("the module `{path}` {message}"), hint));
    }
    let names = || plan.tables.iter().map(|table| table.name.as_str());
    match module.tables.iter().find(|table| names().all(|name| name != table.as_str())) {
        None => Ok(()),
        Some(table) => {
            let message = format!("the module `{path}` has the table `{table}`, which is not in the plan");
            Err(Error::invalid(message, onefold_datasets::suggest(table, names())))
        }
    }
}

/// Returns the module that has a table.
fn module_of<'a>(table: &TablePlan, modules: &'a [Module]) -> Result<&'a Module> {
    let mut naming = modules.iter().filter(|module| module.tables.contains(&table.name));
    let found = naming.next().or_else(|| modules.iter().find(|module| module.tables.is_empty()));
    let wrong = |message: &str| {
        let hint = "every table is in one module: correct the tables of the modules";
        Err(Error::invalid(format!("table `{}` {message}", table.name), hint))
    };
    match found {
        Some(_) if naming.next().is_some() => wrong("is in two modules"),
        Some(module) => Ok(module),
        None => wrong("is in no module"),
    }
}

fn parameter_sharding(plan: &Plan, table: &TablePlan, device: &str) -> Result<Value> {
    let per_node = plan.topology.ranks_per_node.max(1);
    let spec = |shard: &Shard| {
        json!({
            "shard_offsets": [shard.rows.start, shard.columns.start],
            "shard_sizes": [shard.row_count(), shard.column_count()],
            "placement": placement(device, shard.rank, per_node),
        })
    };
    let mut shards: Vec<&Shard> = table.shards.iter().collect();
    shards.sort_by_key(|shard| (shard.rows.start, shard.columns.start, shard.rank));
    let ranks: Vec<u32> = shards.iter().map(|shard| shard.rank).collect();
    let copies = table.sharding_type == ShardingType::DataParallel;
    if let Some(shard) =
        shards.iter().find(|shard| !copies && !shard.column_count().is_multiple_of(COLUMN_STEP))
    {
        return Err(Error::invalid(
            format!(
                "table `{}` has a shard of {} columns on rank {}, and TorchRec's fused tables have multiples of 4",
                table.name,
                shard.column_count(),
                shard.rank
            ),
            "give the table a `dim` that 4 divides and plan again, or have a copy of it on every rank",
        ));
    }
    let sharding_type = match table.sharding_type {
        ShardingType::RowWise => row_wise(plan, table, &shards)?,
        other => other.name(),
    };
    Ok(json!({
        "sharding_type": sharding_type,
        "compute_kernel": if copies { "dense" } else { "fused" },
        "ranks": ranks,
        "sharding_spec": if copies { Value::Null } else { shards.into_iter().map(spec).collect() },
    }))
}

/// Returns the sharding type of a table that is divided by rows. The shards are given in the order of their rows.
/// TorchRec finds the rank of a row by dividing by the block size, so blocks must have equal sizes and be in order on
/// all ranks, or on the ranks of one machine.
fn row_wise(plan: &Plan, table: &TablePlan, shards: &[&Shard]) -> Result<&'static str> {
    let topology = &plan.topology;
    let first = shards.first().map_or(0, |shard| shard.rank);
    let consecutive = (first..).zip(shards).all(|(rank, shard)| shard.rank == rank);
    let blocks = row_blocks(table.rows, shards.len() as u64);
    let equal = blocks.zip(shards).all(|(rows, shard)| shard.rows == rows);
    let count = shards.len() as u32;
    let everywhere = count == topology.ranks;
    let on_node = count == topology.ranks_per_node && first.is_multiple_of(count.max(1));
    if consecutive && equal && everywhere {
        Ok("row_wise")
    } else if consecutive && equal && on_node {
        Ok("table_row_wise")
    } else {
        let message = format!(
            "TorchRec cannot have the rows of table `{}` like this ({}): it has equal blocks on all ranks, or on those of \
             one machine, in the order of the ranks",
            table.name,
            table.described()
        );
        Err(Error::invalid(message, "plan again with `onefold-shard plan`, whose blocks are like that"))
    }
}

/// Returns a placement such as `rank:9/cuda:1`. A CPU has no device number, and TorchRec rejects one.
fn placement(device: &str, rank: u32, per_node: u32) -> String {
    match device {
        "cpu" => format!("rank:{rank}/cpu"),
        _ => format!("rank:{rank}/{device}:{}", rank % per_node),
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::topology::Topology;

    fn load(text: &str) -> Result<TableFile> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.json");
        fs_err::write(&path, text).unwrap();
        load_tables(&path)
    }

    const BAG: &str = r#"{"name": "t", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["f"]"#;

    #[test]
    fn configurations_become_tables() {
        let text = format!(
            r#"{{"global_batch_size": 64, "optimizer": "sgd", "tables": [{BAG}, "pooling": "MEAN", "data_type": "FP16",
                "pooling_factors": [7.5], "dedupe_factor": 3.0}}]}}"#
        );
        let file = load(&text).unwrap();
        let torchrec_name = Some("t".to_owned());
        let expected = Table {
            torchrec_name: torchrec_name.clone(),
            feature: Some("f".into()),
            dtype: DataType::Fp16,
            optimizer: TableOptimizer::Sgd,
            first: Lookups {
                pooling: Pooling::Mean,
                pooling_factor: 7.5,
                dedupe_factor: 3.0,
                ..Lookups::default()
            },
            ..Table::new("t", 100, 8)
        };
        assert_eq!((file.global_batch_size, &file.tables[..]), (64, &[expected][..]));
        let plain = load(&format!(r#"{{"global_batch_size": 64, "tables": [{BAG}}}]}}"#)).unwrap();
        let feature = Some("f".to_owned());
        assert_eq!(plain.tables, [Table { torchrec_name, feature, ..Table::new("t", 100, 8) }]);
    }

    #[test]
    fn a_table_may_have_several_features() {
        let shared = BAG.replace(r#"["f"]"#, r#"["t", "g"]"#);
        let file = load(&format!(
            r#"{{"global_batch_size": 64, "tables": [{shared}, "pooling_factors": [20, 1], "dedupe_factor": 2}}]}}"#
        ));
        let lookups = Lookups { dedupe_factor: 2.0, ..Lookups::default() };
        let further = FeatureLookups { feature: "g".into(), lookups };
        let torchrec_name = Some("t".to_owned());
        let table = Table {
            torchrec_name,
            first: Lookups { pooling_factor: 20.0, dedupe_factor: 2.0, ..Lookups::default() },
            ..Table::new("t", 100, 8)
        };
        assert_eq!(file.unwrap().tables, [Table { further_features: vec![further], ..table }]);
    }

    #[test]
    fn unsupported_settings_are_refused_by_table() {
        let refused = |fields: &str| {
            load(&format!(r#"{{"global_batch_size": 64, "tables": [{BAG}, {fields}}}]}}"#))
                .unwrap_err()
                .to_string()
        };
        assert!(
            refused(r#""data_type": "INT8""#)
                .contains("table `t` has the data type `INT8`\n  hint: give FP32")
        );
        assert!(refused(r#""pooling": "MAX""#).contains("table `t` has the pooling `MAX`"));
        assert!(
            refused(r#""pooling_factors": [1, 2]"#).contains("has 2 pooling factors, and its features are 1")
        );
        assert!(refused(r#""init_fn": 1"#).contains("unknown field `init_fn`"));
        let twice =
            load(&format!(r#"{{"global_batch_size": 64, "tables": [{BAG}}}, {BAG}}}]}}"#)).unwrap_err();
        assert!(twice.to_string().contains("model.json`: table `t` is listed twice"), "{twice}");
        let none = BAG.replace(r#"["f"]"#, "[]");
        let none = load(&format!(r#"{{"global_batch_size": 64, "tables": [{none}}}]}}"#)).unwrap_err();
        assert!(none.to_string().contains("table `t` has no feature"), "{none}");
        let missing = load_tables(Path::new("nowhere.json")).unwrap_err().to_string();
        assert!(missing.contains("there is no such file\n  hint: write {\"global_batch_size\""), "{missing}");
    }

    /// The plan has one table of each sharding type on two machines with two ranks each.
    #[test]
    fn a_plan_is_exported_as_torchrec_has_it() {
        let topology = Topology { ranks_per_node: 2, ..Topology::h100(4, 1 << 30).unwrap() };
        let tables: Vec<Table> = ["whole", "columns", "rows", "node", "copies"]
            .iter()
            .map(|name| Table::new(*name, 8, 8))
            .collect();
        let shards = |i: usize| -> (ShardingType, Vec<Shard>) {
            let part = |rank, rows, columns| Shard { rank, rows, columns };
            match i {
                0 => (ShardingType::TableWise, vec![part(3, 0..8, 0..8)]),
                1 => (ShardingType::ColumnWise, vec![part(2, 0..8, 4..8), part(1, 0..8, 0..4)]),
                2 => (
                    ShardingType::RowWise,
                    (0..4).map(|r| part(r, u64::from(r) * 2..u64::from(r) * 2 + 2, 0..8)).collect(),
                ),
                3 => (ShardingType::RowWise, vec![part(2, 0..4, 0..8), part(3, 4..8, 0..8)]),
                _ => (ShardingType::DataParallel, (0..4).map(|r| part(r, 0..8, 0..8)).collect()),
            }
        };
        let placed = tables.iter().enumerate().map(|(i, table)| {
            let (sharding_type, shards) = shards(i);
            TablePlan::new(table, sharding_type, shards)
        });
        let plan = Plan::predict(
            "test",
            &tables,
            placed.collect(),
            &topology,
            &AnalyticCost,
            topology.global_batch_size(4),
        )
        .unwrap();
        plan.check(&tables, &topology, plan.global_batch_size).unwrap();
        let exported = export(&plan, &[Module::of_all("sparse.ebc")], "cuda").unwrap();
        let module = &exported["plan"]["sparse.ebc"];
        assert_eq!((&exported["world_size"], &exported["local_world_size"]), (&json!(4), &json!(2)));
        assert_eq!(
            module["t_whole"],
            json!({"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [3], "sharding_spec": [
                {"shard_offsets": [0, 0], "shard_sizes": [8, 8], "placement": "rank:3/cuda:1"}]})
        );
        assert_eq!(
            module["t_columns"],
            json!({"sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [1, 2], "sharding_spec": [
                {"shard_offsets": [0, 0], "shard_sizes": [8, 4], "placement": "rank:1/cuda:1"},
                {"shard_offsets": [0, 4], "shard_sizes": [8, 4], "placement": "rank:2/cuda:0"}]})
        );
        assert_eq!(
            (&module["t_rows"]["sharding_type"], &module["t_rows"]["ranks"]),
            (&json!("row_wise"), &json!([0, 1, 2, 3]))
        );
        assert_eq!(
            (&module["t_node"]["sharding_type"], &module["t_node"]["ranks"]),
            (&json!("table_row_wise"), &json!([2, 3]))
        );
        assert_eq!(
            module["t_copies"],
            json!({"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1, 2, 3], "sharding_spec": null})
        );
        let of_cpu = export(&plan, &[Module::of_all("")], "cpu").unwrap();
        assert_eq!(of_cpu["plan"][""]["t_whole"]["sharding_spec"][0]["placement"], "rank:3/cpu");
    }

    /// Returns the error for a plan for two ranks with a table of 10 rows, `dim` columns and these shards.
    fn refused(dim: u64, sharding_type: ShardingType, shards: &[(u32, Range<u64>)]) -> Option<String> {
        let table = Table::new("t", 10, dim);
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let shard =
            |(rank, rows): &(u32, Range<u64>)| Shard { rows: rows.clone(), ..Shard::whole(&table, *rank) };
        let placed = vec![TablePlan::new(&table, sharding_type, shards.iter().map(shard).collect())];
        let tables = std::slice::from_ref(&table);
        let plan = Plan::predict("test", tables, placed, &topology, &AnalyticCost, 8).unwrap();
        plan.check(tables, &topology, 8).unwrap();
        export(&plan, &[Module::of_all("ebc")], "cpu").err().map(|error| error.to_string())
    }

    #[test]
    fn plans_that_torchrec_cannot_represent_are_refused() {
        let rows = |shards: &[(u32, Range<u64>)]| refused(8, ShardingType::RowWise, shards);
        assert_eq!(rows(&[(0, 0..5), (1, 5..10)]), None);
        let all: [&[(u32, Range<u64>)]; 3] =
            [&[(0, 0..3), (1, 3..10)], &[(1, 0..5), (0, 5..10)], &[(0, 0..10)]];
        for other in all {
            let error = rows(other).unwrap();
            assert!(error.starts_with("TorchRec cannot have the rows of table `t` like this"), "{error}");
        }
        let error = refused(10, ShardingType::TableWise, &[(1, 0..10)]).unwrap();
        assert!(error.contains("table `t` has a shard of 10 columns on rank 1"), "{error}");
        assert_eq!(refused(10, ShardingType::DataParallel, &[(0, 0..10), (1, 0..10)]), None);
    }

    #[test]
    fn tables_are_in_the_modules_that_are_named() {
        let name = |name: &str, torchrec_name: Option<&str>| {
            let torchrec_name = torchrec_name.map(str::to_owned);
            Table { torchrec_name, ..Table::new(name, 10, 8) }
        };
        let topology = Topology::h100(1, 1 << 30).unwrap();
        let plan = |tables: &[Table]| {
            let placed = tables.iter().map(|table| TablePlan::table_wise(table, 0)).collect();
            Plan::predict("test", tables, placed, &topology, &AnalyticCost, 8).unwrap()
        };
        let module = |path: &str, tables: &[&str]| Module {
            path: path.into(),
            tables: tables.iter().map(|table| (*table).to_owned()).collect(),
        };
        let tables = [name("user", None), name("my.item", None), name("history", Some("h"))];
        let found =
            export(&plan(&tables), &[module("ec", &["history"]), module("ebc", &[])], "cuda").unwrap();
        let names =
            |module: &str| found["plan"][module].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let [mut bags, sequences] = ["ebc", "ec"].map(names);
        bags.sort();
        assert_eq!(
            (bags, sequences),
            (vec!["t_my_item".to_owned(), "t_user".to_owned()], vec!["h".to_owned()])
        );
        let refused = |tables: &[Table], modules: &[Module]| {
            export(&plan(tables), modules, "cuda").unwrap_err().to_string()
        };
        for (modules, expected) in [
            (vec![module("a", &["user"])], "table `my.item` is in no module"),
            (
                vec![module("a", &["user"]), module("b", &["user"]), module("c", &[])],
                "table `user` is in two modules",
            ),
            (vec![module("a", &[]), module("a", &["user"])], "the module `a` is given twice"),
            (vec![module("a", &[]), module("b", &[])], "would both have all tables"),
            (vec![module("a", &["usr"]), module("b", &[])], "has the table `usr`, which is not in the plan"),
            (vec![module("a..b", &[])], "`a..b` is not the path of a module"),
        ] {
            let error = refused(&tables, &modules);
            assert!(error.contains(expected), "{error}");
        }
        for name_of in ["", "a.b", "t_user"] {
            let error = refused(&[name("user", None), name("other", Some(name_of))], &[Module::of_all("")]);
            assert!(error.contains(&format!("table `other` would be `{name_of}` in TorchRec")), "{error}");
        }
    }
}
