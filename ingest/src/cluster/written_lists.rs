//! The list columns of the samples that are written, with the vocabularies that map their ids to numbers: in
//! memory, or in files that the writing process reads.

use std::path::Path;
use std::sync::Arc;

use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryPool;
use onefold_datasets::IdMap;
use serde::{Deserialize, Serialize};

use super::decode::ListColumn;
use crate::remote::{IdMapFile, IdMaps, LoadedIdMap, WrittenRows};

/// The list columns to write.
#[derive(Debug, Clone)]
pub(crate) enum WrittenLists {
    /// List columns with vocabularies in memory.
    Here(Vec<ListColumn>),
    /// List columns with vocabularies in files, and a cache of the vocabularies that this process has loaded.
    InFiles(SentLists, Arc<IdMaps>),
}

/// List columns in the form that is sent to other machines.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SentLists {
    /// The names of the columns, each with the index of its map in `maps`.
    lists: Vec<(String, Option<usize>)>,
    maps: Vec<IdMapFile>,
}

impl SentLists {
    /// Writes each distinct map of `columns` to the work folder once.
    pub(crate) fn write(folder: &Path, columns: &[ListColumn]) -> crate::error::Result<(Self, WrittenRows)> {
        let mut files = WrittenRows::none_in(folder)?;
        let mut known: Vec<&Arc<IdMap>> = Vec::new();
        let mut sent = Self { lists: Vec::new(), maps: Vec::new() };
        for column in columns {
            let number = match &column.vocabulary {
                None => None,
                Some(map) => Some(match known.iter().position(|known| Arc::ptr_eq(known, map)) {
                    Some(number) => number,
                    None => {
                        let file = IdMapFile::write(folder, map)?;
                        file.file().into_iter().for_each(|file| files.add(file.to_owned()));
                        known.push(map);
                        sent.maps.push(file);
                        known.len() - 1
                    }
                }),
            };
            sent.lists.push((column.name.clone(), number));
        }
        Ok((sent, files))
    }
}

impl WrittenLists {
    /// Returns the columns, and handles that keep their vocabularies in memory, which is taken from `pool`. May
    /// block on storage access.
    pub(crate) fn load(
        &self,
        pool: &Arc<dyn MemoryPool>,
    ) -> Result<(Vec<ListColumn>, Vec<Arc<LoadedIdMap>>)> {
        let (sent, maps) = match self {
            Self::Here(columns) => return Ok((columns.clone(), Vec::new())),
            Self::InFiles(sent, maps) => (sent, maps),
        };
        let loaded = sent.maps.iter().map(|file| maps.load(file, pool)).collect::<Result<Vec<_>>>()?;
        let column = |(name, number): &(String, Option<usize>)| ListColumn {
            name: name.clone(),
            vocabulary: number.and_then(|number| loaded.get(number)).map(|loaded| Arc::clone(&loaded.map)),
        };
        let columns = sent.lists.iter().map(column).collect();
        Ok((columns, loaded))
    }
}
