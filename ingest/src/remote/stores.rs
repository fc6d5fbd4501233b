//! The object stores of a process of a cluster. Each store is connected when a plan first names it, with settings from
//! the environment.

use std::sync::Arc;

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::object_store::{DefaultObjectStoreRegistry, ObjectStoreRegistry};
use object_store::ObjectStore;
use onefold_storage::{Patience, RemoteStore, S3Settings};
use url::Url;

/// The local disk, and object stores by the scheme and host of their URLs.
#[derive(Debug, Default)]
pub struct Stores(DefaultObjectStoreRegistry);

impl ObjectStoreRegistry for Stores {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.0.register_store(url, store)
    }

    fn deregister_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        self.0.deregister_store(url)
    }

    fn get_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        if let Ok(store) = self.0.get_store(url) {
            return Ok(store);
        }
        let remote = RemoteStore::of_url(url, S3Settings::default()).map_err(DataFusionError::Execution)?;
        let (remote, _) =
            remote.ok_or_else(|| DataFusionError::Execution(format!("there is no client for `{url}`")))?;
        let store = remote.connect(Patience::Long)?;
        self.0.register_store(url, Arc::clone(&store));
        Ok(store)
    }
}
