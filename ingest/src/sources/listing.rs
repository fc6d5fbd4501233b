//! Finds the objects of a bucket that belong to a source.

use futures::TryStreamExt;
use glob::Pattern;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};

use super::files::{DELTA_LOG, is_folder_marker, is_hidden, is_pattern, matches_below, refused_table};
use super::stores::SourceStore;
use crate::error::MessageAndHint;

/// Returns the objects whose keys match `pattern`, and all objects in folders whose keys match. The list may be
/// empty.
///
/// # Errors
///
/// The store's error, with an explanation; a message and a hint if a folder is a Delta Lake table.
pub(super) async fn expand(store: &SourceStore, pattern: &str) -> Result<Vec<ObjectMeta>, MessageAndHint> {
    let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
    let mut table = None;
    let found = walk(store.probe(), &parts, &mut table).await.map_err(|error| store.explain(&error))?;
    match table {
        Some(folder) => Err(refused_table(&format!("{}/{folder}", store.url))),
        None => Ok(found),
    }
}

/// Descends into the folders that `parts` name, and lists one level for each part that is a pattern. Sets `table` to a
/// folder that is a Delta Lake table.
async fn walk(
    store: &dyn ObjectStore,
    parts: &[&str],
    table: &mut Option<String>,
) -> object_store::Result<Vec<ObjectMeta>> {
    let hidden_wanted = parts.iter().any(|part| is_hidden(part));
    let mut found = Vec::new();
    // Folders, with the number of parts that they match.
    let mut folders = vec![(String::new(), 0)];
    while let Some((folder, matched)) = folders.pop() {
        let literal = parts[matched..].iter().take_while(|part| !is_pattern(part));
        let fixed = literal.clone().count();
        let folder = literal.fold(folder, |folder, part| join(&folder, part));
        let rest = &parts[matched + fixed..];
        let keep = |name: &str| hidden_wanted || !name.split('/').any(is_hidden);
        match rest {
            [] => {
                let below = below(store, &folder).await?;
                if below.is_empty() && !folder.is_empty() {
                    found.extend(object(store, &folder).await?);
                }
                let is_of_log = |meta: &ObjectMeta| {
                    let rest = relative(meta, &folder).strip_prefix(DELTA_LOG);
                    rest.is_some_and(|rest| rest.starts_with('/'))
                };
                if below.iter().any(is_of_log) {
                    *table = Some(folder.clone());
                }
                found.extend(below.into_iter().filter(|meta| keep(relative(meta, &folder))));
            }
            ["**", ..] => {
                let matching = |meta: &ObjectMeta| {
                    let key = relative(meta, &folder);
                    keep(key) && matches_below(key, rest)
                };
                found.extend(below(store, &folder).await?.into_iter().filter(matching));
            }
            [part, after @ ..] => {
                let pattern = Pattern::new(part).map_err(|error| object_store::Error::Generic {
                    store: "pattern",
                    source: Box::new(error),
                })?;
                let listed = store.list_with_delimiter(prefix(&folder)?.as_ref()).await?;
                let matching =
                    |path: &Path| path.filename().is_some_and(|name| keep(name) && pattern.matches(name));
                let deeper = listed.common_prefixes.into_iter().filter(|path| matching(path));
                folders.extend(deeper.map(|path| (path.to_string(), matched + fixed + 1)));
                if after.is_empty() {
                    found.extend(listed.objects.into_iter().filter(|meta| matching(&meta.location)));
                }
            }
        }
    }
    found.retain(|meta| !is_folder_marker(meta));
    Ok(found)
}

async fn below(store: &dyn ObjectStore, folder: &str) -> object_store::Result<Vec<ObjectMeta>> {
    store.list(prefix(folder)?.as_ref()).try_collect().await
}

async fn object(store: &dyn ObjectStore, key: &str) -> object_store::Result<Option<ObjectMeta>> {
    match store.head(&Path::parse(key)?).await {
        Ok(meta) => Ok(Some(meta)),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn join(folder: &str, part: &str) -> String {
    if folder.is_empty() { part.to_owned() } else { format!("{folder}/{part}") }
}

fn prefix(folder: &str) -> object_store::Result<Option<Path>> {
    if folder.is_empty() { Ok(None) } else { Ok(Some(Path::parse(folder)?)) }
}

/// Returns an object's key relative to `folder`.
fn relative<'a>(meta: &'a ObjectMeta, folder: &str) -> &'a str {
    let key = meta.location.as_ref();
    key.strip_prefix(folder).unwrap_or(key).trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn patterns_go_down_the_folders() {
        let store = InMemory::new();
        futures::executor::block_on(async {
            for key in [
                "events/date=1/a.parquet",
                "events/date=1/b.json",
                "events/date=2/hour=3/a.parquet",
                "events/date=2/_temporary/a.parquet",
                "events/_SUCCESS",
                "events/top.parquet",
                "other/date=1/a.parquet",
            ] {
                store.put(&Path::from(key), b"x".to_vec().into()).await.unwrap();
            }
            store.put(&Path::from("events/date=9"), Vec::new().into()).await.unwrap();
        });
        let bucket = SourceStore::of_tests(Arc::new(store));
        let found = |pattern: &str| {
            let found = futures::executor::block_on(expand(&bucket, pattern)).unwrap();
            let mut keys: Vec<String> = found.iter().map(|meta| meta.location.to_string()).collect();
            keys.sort();
            keys.join(" ")
        };
        let (one, two) = ("events/date=1/a.parquet", "events/date=2/hour=3/a.parquet");
        assert_eq!(found("events/date=1/a.parquet"), one);
        assert_eq!(found("events/date=1"), format!("{one} events/date=1/b.json"));
        assert_eq!(found("events/date=*/"), format!("{one} events/date=1/b.json {two}"));
        assert_eq!(found("events/date=*/*.parquet"), one);
        assert_eq!(found("*/date=?/*.parquet"), format!("{one} other/date=1/a.parquet"));
        assert_eq!(found("events/**/*.parquet"), format!("{one} {two} events/top.parquet"));
        assert_eq!(found("events/**/hour=*"), two);
        assert_eq!(found("events/date=2/_temporary"), "events/date=2/_temporary/a.parquet");
        assert_eq!(found("nothing"), "");
        assert_eq!(found("events/date=7*"), "");
        assert_eq!(found("").split(' ').count(), 5);
    }

    #[test]
    fn the_folder_of_a_table_is_refused() {
        let store = InMemory::new();
        futures::executor::block_on(async {
            for key in ["tables/events/a.parquet", "tables/events/_delta_log/0.json"] {
                store.put(&Path::from(key), b"x".to_vec().into()).await.unwrap();
            }
        });
        let bucket = SourceStore::of_tests(Arc::new(store));
        let expanded = |pattern: &str| futures::executor::block_on(expand(&bucket, pattern));
        for pattern in ["tables/events", "tables/events/", "tables/*"] {
            let (message, hint) = expanded(pattern).unwrap_err();
            assert!(message.contains("Delta Lake table"), "{message}");
            assert!(hint.contains("{ delta = \"s3://logs/tables/events\" }"), "{hint}");
        }
        assert_eq!(expanded("tables/events/*.parquet").unwrap().len(), 1);
    }
}
