//! The learned cost models of the hardware of all ranks.

use onefold_base::fault::{option, text};

use crate::cost::learned::traffic;
use crate::cost::model_file::ModelFile;
use crate::cost::{CostModel, RankLoad, ShardLoad, Traffic};
use crate::error::{Error, Result};
use crate::topology::Topology;

/// Learned cost models, one for each kind of hardware of a topology.
///
/// The computation and the exchange of each rank are predicted by the rank's own model.
#[derive(Debug, Clone)]
pub struct LearnedCosts {
    id: String,
    models: Vec<ModelFile>,
    /// The index of the model of every rank.
    of_rank: Vec<usize>,
}

impl LearnedCosts {
    /// Assigns the models of these files to the ranks of a topology, by hardware.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no model, two models are for the same hardware, or there is no model for the
    /// hardware of a rank. With `any_hardware`, ranks without a model use the first one.
    pub fn new(files: Vec<ModelFile>, topology: &Topology, any_hardware: bool) -> Result<Self> {
        let machines: Vec<&str> = files.iter().map(|file| file.machine.as_str()).collect();
        if files.is_empty() {
            return Err(Error::invalid(
                "there is no cost model",
                "name one for each hardware of the topology",
            ));
        }
        if let Some(twice) = (1..machines.len()).find(|i| machines[..*i].contains(&machines[*i])) {
            let message = format!("two cost models were trained on `{}`", machines[twice]);
            return Err(Error::invalid(message, "give one model for each hardware of the topology"));
        }
        let mut of_rank = Vec::with_capacity(topology.ranks as usize);
        for rank in 0..topology.ranks {
            let hardware = topology.hardware_of(rank);
            let own = machines.iter().position(|machine| hardware == Some(*machine));
            match own.or(any_hardware.then_some(0)) {
                Some(model) => of_rank.push(model),
                None => return Err(no_model(rank, hardware, &machines)),
            }
        }
        // Models that no rank uses are dropped.
        let used: Vec<usize> = (0..files.len()).filter(|model| of_rank.contains(model)).collect();
        of_rank.iter_mut().for_each(|model| *model = used.partition_point(|other| other < model));
        let files = files.into_iter().enumerate().filter(|(number, _)| used.contains(number));
        let models: Vec<ModelFile> = files.map(|(_, file)| file).collect();
        let id = models.iter().map(ModelFile::id).collect::<Vec<_>>().join(" and ");
        Ok(Self { id, models, of_rank })
    }

    fn model(&self, rank: u32) -> &ModelFile {
        &self.models[self.of_rank[rank as usize]]
    }

    /// Returns the prediction of each rank's own model for that rank. `of_all` returns the predictions of a model for
    /// all ranks.
    fn of_own_model(&self, of_all: impl Fn(&ModelFile) -> Vec<f64>) -> Vec<f64> {
        let by_model: Vec<Vec<f64>> = self.models.iter().map(of_all).collect();
        self.of_rank.iter().enumerate().map(|(rank, model)| by_model[*model][rank]).collect()
    }
}

fn no_model(rank: u32, hardware: Option<&str>, machines: &[&str]) -> Error {
    let known: Vec<String> = machines.iter().map(|machine| format!("`{machine}`")).collect();
    let (message, hint) = match hardware {
        Some(hardware) => (
            format!("there is no cost model for `{hardware}`, which rank {rank} is"),
            text![
                "give another model with ",
                option("model"),
                ", trained on it, or accept wrong costs with ",
                option("any_hardware")
            ],
        ),
        None => (
            format!("the topology does not say what hardware rank {rank} is of"),
            text![
                "set \"hardware\" in the topology or its group, or accept wrong costs with ",
                option("any_hardware")
            ],
        ),
    };
    Error::invalid(format!("{message}; the cost models are of {}", known.join(", ")), hint)
}

impl CostModel for LearnedCosts {
    fn id(&self) -> &str {
        &self.id
    }

    fn shard_ms(&self, load: &ShardLoad<'_>) -> Result<f64> {
        self.model(load.shard.rank).shard_ms(load)
    }

    fn idle_ms(&self, rank: u32) -> f64 {
        self.model(rank).compute.fixed
    }

    fn correction_ms(&self, rank: u32, shards: &[ShardLoad<'_>]) -> f64 {
        self.model(rank).correction_ms(shards)
    }

    /// Returns the time on the slowest hardware: every rank sends requests, and a step lasts until all ranks are
    /// done.
    fn asking_ms(&self, load: &ShardLoad<'_>) -> f64 {
        self.models.iter().map(|model| model.asking_ms(load)).fold(0.0, f64::max)
    }

    fn traffic(&self, load: &ShardLoad<'_>) -> Traffic {
        traffic(load)
    }

    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology, waits: bool) -> Vec<f64> {
        self.of_own_model(|model| model.communication_ms(ranks, topology, waits))
    }

    fn notes(&self, ranks: &[Vec<ShardLoad<'_>>]) -> Vec<String> {
        let mut notes = Vec::new();
        for (number, model) in self.models.iter().enumerate() {
            let own = ranks.iter().zip(&self.of_rank);
            let own = own.map(|(loads, of)| if *of == number { loads.clone() } else { Vec::new() });
            let own: Vec<Vec<ShardLoad<'_>>> = own.collect();
            let of_hardware = |note: String| match self.models.len() {
                1 => note,
                _ => format!("{}: {note}", model.machine),
            };
            notes.extend(model.notes(&own).into_iter().map(of_hardware));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::linear::LinearModel;
    use crate::search::Search;
    use crate::search::beam::Beam;
    use crate::table::Table;
    use crate::topology::RankGroup;

    /// Returns the shipped model, and the same model for hardware that takes three times as long.
    fn files() -> [ModelFile; 2] {
        let fast = ModelFile::shipped("cpu").unwrap();
        let mut slow = ModelFile { machine: "slow".into(), ..fast.clone() };
        let LinearModel { work, asked, fixed, .. } = &mut slow.compute;
        work.iter_mut().chain(asked).chain([fixed]).for_each(|weight| *weight *= 3.0);
        [fast, slow]
    }

    fn topology(hardware: [Option<&str>; 2]) -> Topology {
        let groups = hardware.map(|name| RankGroup {
            ranks: 1,
            hardware: name.map(str::to_owned),
            ..RankGroup::default()
        });
        Topology { groups: groups.to_vec(), ..Topology::h100(2, 1 << 34).unwrap() }
    }

    #[test]
    fn every_rank_costs_what_its_own_model_says() {
        let [fast, slow] = files();
        let topology = topology([Some("slow"), Some(&fast.machine)]);
        let model = LearnedCosts::new(vec![fast.clone(), slow.clone()], &topology, false).unwrap();
        let tables: Vec<Table> = (0..24)
            .map(|i| Table {
                first: crate::lookups::Lookups::of(5.0),
                ..Table::new(format!("t{i}"), 200_000, 64)
            })
            .collect();
        let plan = Beam::Full.plan(&tables, &topology, &model, topology.global_batch_size(4096)).unwrap();
        plan.check(&tables, &topology, plan.global_batch_size).unwrap();
        let loads = plan.loads(&tables).unwrap();
        assert!(loads[0].len() < loads[1].len() && !loads[0].is_empty(), "{plan:?}");
        for (rank, file) in [slow, fast.clone()].into_iter().enumerate() {
            let alone = LearnedCosts::new(vec![file], &topology, true).unwrap();
            let own = crate::cost::rank_costs(&alone, &loads, &topology).unwrap()[rank].compute_ms;
            // All ranks spend as long on requests as the slowest one.
            let asking = |model: &dyn CostModel| -> f64 {
                loads.iter().flatten().map(|load| model.asking_ms(load)).sum()
            };
            let own = own - asking(&alone) + asking(&model);
            assert!((plan.ranks[rank].compute_ms / own - 1.0).abs() < 1e-9, "{own} {plan:?}");
        }
        assert!(plan.cost_model.contains(") and learned_v4 (slow"), "{}", plan.cost_model);
        assert!(plan.notes.iter().any(|note| note.starts_with("slow: ")), "{:?}", plan.notes);
    }

    #[test]
    fn hardware_without_a_model_is_named() {
        let [fast, slow] = files();
        let unknown = topology([Some("new"), Some("slow")]);
        let refused = |files: Vec<ModelFile>, topology: &Topology| {
            LearnedCosts::new(files, topology, false).unwrap_err().to_string()
        };
        let error = refused(vec![fast.clone(), slow.clone()], &unknown);
        assert!(
            error.starts_with("there is no cost model for `new`, which rank 0 is; the cost models are of")
        );
        assert!(
            error.contains("\n  hint: give another model with the option `model`, trained on it"),
            "{error}"
        );
        let error = refused(vec![fast.clone(), slow.clone()], &topology([None, Some("slow")]));
        assert!(error.starts_with("the topology does not say what hardware rank 0 is of"), "{error}");
        let error = refused(vec![slow.clone(), slow.clone()], &unknown);
        assert!(error.starts_with("two cost models were trained on `slow`"), "{error}");
        assert!(refused(vec![], &unknown).starts_with("there is no cost model"));
        // The first model is used instead, and the other one is dropped.
        let model = LearnedCosts::new(vec![slow.clone(), fast.clone()], &unknown, true).unwrap();
        assert_eq!((model.of_rank.as_slice(), model.models.len()), (&[0, 0][..], 1));
        let only_second = topology([Some("slow"), Some("slow")]);
        let model = LearnedCosts::new(vec![fast, slow], &only_second, false).unwrap();
        assert_eq!((model.of_rank.as_slice(), model.models.len()), (&[0, 0][..], 1));
        assert!(model.id().contains("slow"), "{}", model.id());
    }
}
