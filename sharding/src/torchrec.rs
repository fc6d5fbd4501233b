//! To and from TorchRec: its embedding configurations in, a plan that builds its `ShardingPlan` out.
//!
//! What comes in is JSON with the fields of `EmbeddingBagConfig`, and per table the `pooling_factors` of
//! `ParameterConstraints`, one for every feature, if they are known:
//!
//! ```json
//! {"global_batch_size": 512, "optimizer": "row_wise_adagrad", "tables": [
//!   {"name": "t_user", "num_embeddings": 1000000, "embedding_dim": 64, "feature_names": ["user_id"],
//!    "pooling": "SUM", "data_type": "FP32", "pooling_factors": [1.0]}]}
//! ```
//!
//! `dedupe_factor` and `access_bins` are those of each of a table's features.
//!
//! What goes out is described at [`export`].

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    AccessBins, DataType, Error, FurtherFeature, Plan, Pooling, Result, ShardingType, Table, TableFile,
    TableOptimizer, TablePlan,
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    global_batch_size: u64,
    #[serde(default)]
    optimizer: TableOptimizer,
    tables: Vec<BagConfig>,
}

/// `EmbeddingBagConfig`, and what planning needs beside it.
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
/// [`Error::Fault`] if the file is missing or malformed, a table has no feature, not as many pooling factors as
/// features, or a type or a pooling that is not known here.
pub fn load_tables(path: &Path) -> Result<TableFile> {
    let wrong = |message: String, hint: &str| Error::file(path, message, hint);
    let shape = "write {\"global_batch_size\": N, \"tables\": [{\"name\", \"num_embeddings\", \"embedding_dim\", \"feature_names\", …}]}, \
                 the fields of `EmbeddingBagConfig`";
    let bytes = match fs_err::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(wrong("there is no such file".to_owned(), shape));
        }
        other => other?,
    };
    let model: Model = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string(), shape))?;
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
        // An `EmbeddingCollection`: a vector per id, as attention needs them.
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
    // TorchRec's default.
    let factors = config.pooling_factors.unwrap_or_else(|| vec![1.0; features]);
    if factors.len() != features {
        let message =
            format!("table `{name}` has {} pooling factors, and its features are {features}", factors.len());
        return Err(Error::invalid(message, "give one for each: the mean number of its ids per sample"));
    }
    let (dedupe_factor, access_bins) = (config.dedupe_factor.unwrap_or(1.0), config.access_bins);
    let further = further.iter().zip(&factors[1..]).map(|(feature, pooling_factor)| FurtherFeature {
        pooling,
        pooling_factor: *pooling_factor,
        dedupe_factor,
        access_bins,
        ..FurtherFeature::new(feature)
    });
    Ok(Table {
        feature: (first != name).then(|| first.clone()),
        dtype,
        optimizer,
        pooling,
        pooling_factor: factors[0],
        dedupe_factor,
        access_bins,
        further_features: further.collect(),
        ..Table::new(config.name, config.num_embeddings, config.embedding_dim)
    })
}

/// A plan as JSON that builds TorchRec's `ShardingPlan`: for `module`, the path of the embedding collection in the
/// model (`""` if it is the model), every table's `ParameterSharding`: `sharding_type`, `compute_kernel`, `ranks`, and
/// the `sharding_spec` as a list of `shard_offsets`, `shard_sizes` and `placement`, null for data-parallel tables.
///
/// `device` is `cuda` or `cpu`. A row-wise table within one of several machines is TorchRec's `table_row_wise`.
pub fn export(plan: &Plan, module: &str, device: &str) -> Value {
    let mut tables = Map::new();
    for table in &plan.tables {
        tables.insert(table.name.clone(), parameter_sharding(plan, table, device));
    }
    json!({
        "format_version": 1,
        "world_size": plan.topology.ranks,
        "local_world_size": plan.topology.ranks_per_node,
        "plan": { module: tables },
    })
}

fn parameter_sharding(plan: &Plan, table: &TablePlan, device: &str) -> Value {
    let per_node = plan.topology.ranks_per_node.max(1);
    let spec = |shard: &crate::Shard| {
        json!({
            "shard_offsets": [shard.rows.start, shard.columns.start],
            "shard_sizes": [shard.row_count(), shard.column_count()],
            "placement": placement(device, shard.rank, per_node),
        })
    };
    let mut shards: Vec<&crate::Shard> = table.shards.iter().collect();
    shards.sort_by_key(|shard| (shard.rows.start, shard.columns.start, shard.rank));
    let ranks: Vec<u32> = shards.iter().map(|shard| shard.rank).collect();
    let everywhere = ranks.len() == plan.topology.ranks as usize;
    let sharding_type = match table.sharding_type {
        ShardingType::RowWise if !everywhere => "table_row_wise",
        other => other.name(),
    };
    let copies = table.sharding_type == ShardingType::DataParallel;
    json!({
        "sharding_type": sharding_type,
        "compute_kernel": if copies { "dense" } else { "fused" },
        "ranks": ranks,
        "sharding_spec": if copies { Value::Null } else { shards.into_iter().map(spec).collect() },
    })
}

/// `rank:9/cuda:1`; a CPU has no number, and TorchRec refuses one.
fn placement(device: &str, rank: u32, per_node: u32) -> String {
    match device {
        "cpu" => format!("rank:{rank}/cpu"),
        _ => format!("rank:{rank}/{device}:{}", rank % per_node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnalyticCost, Shard, Topology};

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
        let expected = Table {
            feature: Some("f".into()),
            dtype: DataType::Fp16,
            optimizer: TableOptimizer::Sgd,
            pooling: Pooling::Mean,
            pooling_factor: 7.5,
            dedupe_factor: 3.0,
            ..Table::new("t", 100, 8)
        };
        assert_eq!((file.global_batch_size, &file.tables[..]), (64, &[expected][..]));
        let plain = load(&format!(r#"{{"global_batch_size": 64, "tables": [{BAG}}}]}}"#)).unwrap();
        let feature = Some("f".to_owned());
        assert_eq!(plain.tables, [Table { feature, ..Table::new("t", 100, 8) }]);
    }

    #[test]
    fn a_table_may_have_several_features() {
        let shared = BAG.replace(r#"["f"]"#, r#"["t", "g"]"#);
        let file = load(&format!(
            r#"{{"global_batch_size": 64, "tables": [{shared}, "pooling_factors": [20, 1], "dedupe_factor": 2}}]}}"#
        ));
        let further = FurtherFeature { dedupe_factor: 2.0, ..FurtherFeature::new("g") };
        let table = Table { pooling_factor: 20.0, dedupe_factor: 2.0, ..Table::new("t", 100, 8) };
        assert_eq!(file.unwrap().tables, [Table { further_features: vec![further], ..table }]);
    }

    #[test]
    fn what_is_not_known_is_refused_by_table() {
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
        assert!(twice.to_string().contains("model.json`: table `t` stands there twice"), "{twice}");
        let none = BAG.replace(r#"["f"]"#, "[]");
        let none = load(&format!(r#"{{"global_batch_size": 64, "tables": [{none}}}]}}"#)).unwrap_err();
        assert!(none.to_string().contains("table `t` has no feature"), "{none}");
        let missing = load_tables(Path::new("nowhere.json")).unwrap_err().to_string();
        assert!(missing.contains("there is no such file\n  hint: write {\"global_batch_size\""), "{missing}");
    }

    /// One table of each type on two machines of two.
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
            TablePlan { name: table.name.clone(), rows: 8, dim: 8, sharding_type, shards, reason: None }
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
        let exported = export(&plan, "sparse.ebc", "cuda");
        let module = &exported["plan"]["sparse.ebc"];
        assert_eq!((&exported["world_size"], &exported["local_world_size"]), (&json!(4), &json!(2)));
        assert_eq!(
            module["whole"],
            json!({"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [3], "sharding_spec": [
                {"shard_offsets": [0, 0], "shard_sizes": [8, 8], "placement": "rank:3/cuda:1"}]})
        );
        assert_eq!(
            module["columns"],
            json!({"sharding_type": "column_wise", "compute_kernel": "fused", "ranks": [1, 2], "sharding_spec": [
                {"shard_offsets": [0, 0], "shard_sizes": [8, 4], "placement": "rank:1/cuda:1"},
                {"shard_offsets": [0, 4], "shard_sizes": [8, 4], "placement": "rank:2/cuda:0"}]})
        );
        assert_eq!(
            (&module["rows"]["sharding_type"], &module["rows"]["ranks"]),
            (&json!("row_wise"), &json!([0, 1, 2, 3]))
        );
        assert_eq!(
            (&module["node"]["sharding_type"], &module["node"]["ranks"]),
            (&json!("table_row_wise"), &json!([2, 3]))
        );
        assert_eq!(
            module["copies"],
            json!({"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1, 2, 3], "sharding_spec": null})
        );
        assert_eq!(
            export(&plan, "", "cpu")["plan"][""]["whole"]["sharding_spec"][0]["placement"],
            "rank:3/cpu"
        );
    }
}
