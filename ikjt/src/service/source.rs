//! The source of a reader's batches that requests them from a service.

use std::path::Path;
use std::sync::Arc;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use onefold_storage::runtime;

use super::address::ServiceAddress;
use super::client::{OPENING, PATIENCE, Service};
use super::fetch::Fetch;
use super::protocol::{CountSamples, FindSnapshot, FindStatistics, Job, Question};
use crate::error::Result;
use crate::reader::{Asked, Deliver, IsGone, Source, Wanted};

/// Connects to the service at `location`, and waits for an answer of its master. Returns `None` if it is not the
/// location of a service.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) for an incomplete location, and if the master does not answer or refuses
/// this client.
pub fn connect(location: &Path) -> Result<Option<Arc<dyn Source>>> {
    let Some(address) = ServiceAddress::parse(location)? else { return Ok(None) };
    let (service, location) = Service::connect(address)?;
    Ok(Some(Arc::new(Served { service, location })))
}

/// A dataset that a service reads.
#[derive(Debug)]
struct Served {
    service: Arc<Service>,
    /// The dataset's location from the view of the workers.
    location: String,
}

impl Served {
    fn job(&self, asked: &Asked) -> Job {
        let Asked { identity, options, rank } = asked.clone();
        Job { dataset: self.location.clone(), identity, options, rank }
    }

    /// Asks the worker that answers questions about the dataset.
    fn ask_about_dataset<Q: Question + Sync>(&self, question: Q) -> Result<Q::Answer> {
        self.service.ask(OPENING, Some((self.location.clone(), None)), question)
    }
}

impl Source for Served {
    fn location(&self) -> &str {
        &self.location
    }

    fn snapshot(&self, number: Option<u64>) -> Result<Snapshot> {
        let location = self.location.clone();
        self.ask_about_dataset(FindSnapshot { location, number })
    }

    fn statistics(&self, number: u64, partitions: &PartitionFilter) -> Result<SampleStatistics> {
        let (location, partitions) = (self.location.clone(), partitions.clone());
        self.ask_about_dataset(FindStatistics { location, number, partitions })
    }

    fn sample_counts(&self, asked: &Asked, epoch: u64) -> Result<Vec<Vec<u64>>> {
        let job = self.job(asked);
        let question = CountSamples { job: job.key(), epoch };
        let counts = self.service.ask(PATIENCE, Some((job.key(), Some(job))), question)?;
        Ok(counts.sampled.unwrap_or_default())
    }

    fn batches(
        &self,
        asked: &Asked,
        wanted: Wanted,
        deliver: &mut Deliver<'_>,
        is_gone: &IsGone<'_>,
    ) -> Result<()> {
        let fetch = Fetch::new(&self.service, self.job(asked), wanted);
        runtime::block_on(fetch.run(deliver, is_gone))?
    }
}
