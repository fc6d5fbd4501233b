//! The object stores of a process of a cluster. Each store is connected when a plan first names it, with settings from
//! the environment.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::object_store::ObjectStoreRegistry;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use onefold_base::sync::locked;
use onefold_storage::{Patience, RemoteStore, S3Settings};
use url::Url;

/// Object stores by the scheme and host of their URLs.
#[derive(Debug, Default)]
pub struct Stores(Mutex<HashMap<String, Arc<dyn ObjectStore>>>);

fn key(url: &Url) -> String {
    url[..url::Position::BeforePath].to_owned()
}

impl ObjectStoreRegistry for Stores {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        locked(&self.0).insert(key(url), store)
    }

    fn deregister_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        let store = locked(&self.0).remove(&key(url));
        store.ok_or_else(|| DataFusionError::Execution(format!("no store of `{url}` is registered")))
    }

    fn get_store(&self, url: &Url) -> Result<Arc<dyn ObjectStore>> {
        let mut stores = locked(&self.0);
        if let Some(store) = stores.get(&key(url)) {
            return Ok(Arc::clone(store));
        }
        let store = connect(url)?;
        stores.insert(key(url), Arc::clone(&store));
        Ok(store)
    }
}

/// Connects to the store of a URL.
fn connect(url: &Url) -> Result<Arc<dyn ObjectStore>> {
    if url.scheme() == "file" {
        return Ok(Arc::new(LocalFileSystem::new()));
    }
    let remote = RemoteStore::of_url(url, S3Settings::default()).map_err(DataFusionError::Execution)?;
    let (remote, _) =
        remote.ok_or_else(|| DataFusionError::Execution(format!("there is no client for `{url}`")))?;
    Ok(remote.connect(Patience::Long)?)
}
