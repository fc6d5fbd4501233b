//! The service's rates, and the factor that limits them. Pure functions of the figures that workers and clients
//! report.

use onefold_ikjt::StageFigures;
use onefold_ikjt::service::protocol::ClientState;
use serde::{Deserialize, Serialize};

/// A client whose share of waiting is below this value counts as not waiting.
const WAITS: f64 = 0.1;

/// Workers whose share of busy threads is at least this value have no spare time.
const BUSY: f64 = 0.75;

/// A worker's rates over the last 2 to 4 seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerRate {
    pub(crate) address: String,
    pub(crate) threads: usize,
    /// The processor seconds per second.
    pub(crate) busy_threads: f64,
    pub(crate) samples_computed_per_second: f64,
    pub(crate) bytes_sent_per_second: f64,
    /// The share of the sent batches that were already available, because another client had requested them.
    pub(crate) shared_share: f64,
    /// The seconds per second, summed over the reader's threads.
    pub(crate) stages: StageFigures,
}

/// A client's rates over the last 2 to 4 seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClientRate {
    pub(crate) client: String,
    pub(crate) samples_per_second: f64,
    pub(crate) bytes_per_second: f64,
    /// The share of the time in which the client's caller waits for a batch.
    pub(crate) waiting_share: f64,
}

/// The factor that limits the rate at which trainers receive batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    /// No client reads.
    #[default]
    Nothing,
    /// Trainers do not wait for batches.
    Trainer,
    /// Workers mostly read and verify files.
    Storage,
    /// Workers mostly decode.
    Decode,
    /// Workers mostly deduplicate and preprocess.
    Transform,
    /// Workers and storage have spare time.
    Network,
}

impl Limit {
    /// Determines the limit for `clients` that `workers` work for.
    pub(crate) fn of(workers: &[WorkerRate], clients: &[ClientRate]) -> Self {
        let waiting = clients.iter().map(|client| client.waiting_share).sum::<f64>();
        if clients.is_empty() {
            return Self::Nothing;
        }
        if waiting < WAITS * clients.len() as f64 {
            return Self::Trainer;
        }
        let threads = workers.iter().map(|worker| worker.threads as f64).sum::<f64>();
        let used = workers.iter().map(|worker| worker.busy_threads).sum::<f64>();
        let sum = |of: fn(&StageFigures) -> f64| workers.iter().map(|worker| of(&worker.stages)).sum::<f64>();
        let storage = sum(|stages| stages.read_seconds + stages.verify_seconds);
        let decode = sum(|stages| stages.decode_seconds + stages.arrange_seconds);
        let transform =
            sum(|stages| stages.cut_seconds + stages.deduplicate_seconds + stages.preprocess_seconds);
        // Threads that share processors with other processes, or whose quota is used up, are busy without using them.
        let busy = used.max(decode + transform);
        match busy >= BUSY * threads {
            true if decode >= transform => Self::Decode,
            true => Self::Transform,
            false if storage > decode + transform => Self::Storage,
            false => Self::Network,
        }
    }

    /// Describes the limit and its remedy.
    pub(crate) fn explain(self) -> &'static str {
        match self {
            Self::Nothing => "Nobody reads.",
            Self::Trainer => "Trainers get batches as fast as they take them.",
            Self::Storage => {
                "Workers wait for storage: more workers, or a storage that is nearer, would help."
            }
            Self::Decode => "Workers spend their time on decoding: more workers would help.",
            Self::Transform => {
                "Workers spend their time on deduplicating and preprocessing: more workers would help."
            }
            Self::Network => {
                "Workers and storage have time left: the network, or what the client does with batches, limits."
            }
        }
    }
}

/// The output of `jobs --json`.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct JobRates {
    /// The jobs, in the order of their datasets.
    pub(crate) jobs: Vec<JobRate>,
}

/// The rates of a job's clients.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct JobRate {
    /// The key of the job.
    pub(crate) job: String,
    /// The dataset's location.
    pub(crate) dataset: String,
    /// The number of clients that read it now.
    pub(crate) clients: usize,
    /// The samples per second that all clients of the job receive together.
    pub(crate) samples_per_second: f64,
    /// The share of the time in which a client waits, as a mean over the clients.
    pub(crate) waiting_share: f64,
    /// The number of samples that these clients have received so far.
    pub(crate) samples: u64,
}

impl JobRates {
    /// Returns the jobs of a service, given its clients, sorted by job, and their rates.
    pub(crate) fn of(clients: &[ClientState], rates: &[ClientRate]) -> Self {
        let mut jobs: Vec<JobRate> = Vec::new();
        // The clients of a job are adjacent.
        for (client, rate) in clients.iter().zip(rates) {
            if jobs.last().is_none_or(|job| job.job != client.job) {
                let (job, dataset) = (client.job.clone(), client.dataset.clone());
                jobs.push(JobRate { job, dataset, ..JobRate::default() });
            }
            if let Some(job) = jobs.last_mut() {
                job.clients += 1;
                job.samples_per_second += rate.samples_per_second;
                job.waiting_share += (rate.waiting_share - job.waiting_share) / job.clients as f64;
                job.samples += client.samples;
            }
        }
        Self { jobs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_a_job_are_counted_together() {
        let client = |job: &str, samples| {
            let (client, dataset) = (format!("{job}{samples}"), format!("s3://{job}"));
            let job = job.to_owned();
            ClientState { client, job, dataset, samples, seconds: 1.0, ..ClientState::default() }
        };
        let rate = |samples_per_second, waiting_share| ClientRate {
            samples_per_second,
            waiting_share,
            ..ClientRate::default()
        };
        let clients = [client("a", 10), client("a", 20), client("b", 3)];
        let rates = [rate(100.0, 0.5), rate(300.0, 0.0), rate(7.0, 1.0)];
        let job = |job: &str, clients, samples_per_second, waiting_share, samples| JobRate {
            job: job.to_owned(),
            dataset: format!("s3://{job}"),
            clients,
            samples_per_second,
            waiting_share,
            samples,
        };
        assert_eq!(
            JobRates::of(&clients, &rates).jobs,
            [job("a", 2, 400.0, 0.25, 30), job("b", 1, 7.0, 1.0, 3)]
        );
        assert_eq!(JobRates::of(&[], &[]).jobs, []);
    }

    #[test]
    fn the_limit_is_found() {
        let worker =
            |busy_threads, stages| WorkerRate { threads: 4, busy_threads, stages, ..WorkerRate::default() };
        let client = |waiting_share| ClientRate { waiting_share, ..ClientRate::default() };
        let decoding =
            StageFigures { decode_seconds: 3.0, preprocess_seconds: 1.0, ..StageFigures::default() };
        let transforming =
            StageFigures { preprocess_seconds: 4.0, decode_seconds: 1.0, ..StageFigures::default() };
        let reading = StageFigures { read_seconds: 9.0, decode_seconds: 1.0, ..StageFigures::default() };
        let waits = [client(0.5)];
        assert_eq!(Limit::of(&[worker(4.0, decoding)], &[]), Limit::Nothing);
        assert_eq!(Limit::of(&[worker(4.0, decoding)], &[client(0.05)]), Limit::Trainer);
        assert_eq!(Limit::of(&[worker(3.9, decoding)], &waits), Limit::Decode);
        assert_eq!(Limit::of(&[worker(3.9, transforming)], &waits), Limit::Transform);
        assert_eq!(Limit::of(&[worker(0.5, reading)], &waits), Limit::Storage);
        assert_eq!(Limit::of(&[worker(0.5, decoding.scaled(0.1))], &waits), Limit::Network);
        // Threads that get half of their processors work all the time.
        assert_eq!(Limit::of(&[worker(2.0, decoding)], &waits), Limit::Decode);
        assert_eq!(Limit::of(&[worker(2.0, transforming)], &waits), Limit::Transform);
    }
}
