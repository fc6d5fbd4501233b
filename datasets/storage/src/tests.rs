use std::io::Write;

use object_store::memory::InMemory;
use onefold_base::fault::Explain;

use super::*;

fn storages() -> (tempfile::TempDir, Vec<Storage>) {
    let directory = tempfile::tempdir().unwrap();
    // These characters have different meanings in paths, URLs and stores.
    let local = Storage::open(&directory.path().join("a dataset#1 100%")).unwrap();
    (directory, vec![local, Storage::over(Arc::new(InMemory::new()), "some/folder")])
}

#[test]
fn objects_are_created_once() {
    let (_directory, storages) = storages();
    for storage in storages {
        let path = "snapshots/00000001.json";
        assert_eq!(storage.read(path).unwrap(), None);
        assert_eq!(storage.create(path, b"first".to_vec()).unwrap(), Created::Yes);
        assert_eq!(storage.create(path, b"second".to_vec()).unwrap(), Created::Exists, "{storage:?}");
        assert_eq!(storage.read(path).unwrap().unwrap(), "first");
        storage.replace(path, b"third".to_vec()).unwrap();
        assert_eq!(storage.read(path).unwrap().unwrap(), "third");
        assert_eq!(storage.list("", None).unwrap().len(), 1, "nothing is left beside it");
    }
}

#[test]
fn an_upload_replaces_no_device() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(directory.path()).unwrap();
    mknodat(CWD, directory.path().join("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for name in ["pipe", "folder"] {
        fs_err::create_dir_all(directory.path().join("folder")).unwrap();
        let error = storage.upload(name).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}`: this is a folder, a device or a pipe")), "{error}");
    }
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn one_of_many_writers_creates_an_object() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(directory.path()).unwrap();
    let created: usize = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|writer: u8| {
                let storage = storage.clone();
                scope.spawn(move || {
                    let created = |n: i32| storage.create(&format!("{n}.json"), vec![writer]).unwrap();
                    (0..50).filter(|n| created(*n) == Created::Yes).count()
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).sum()
    });
    assert_eq!(created, 50);
}

#[test]
fn ranges_of_a_streamed_object_are_its_bytes() {
    let (_directory, storages) = storages();
    let content: Vec<u8> = (0..=250).cycle().take(20 << 20).collect();
    for storage in storages {
        let path = "data/day=1%2F2/bucket=003/part.parquet";
        let mut upload = storage.upload(path).unwrap();
        content.chunks(999_983).for_each(|chunk| upload.write_all(chunk).unwrap());
        assert!(storage.head(path).unwrap().is_none(), "visible before it is finished");
        upload.finish().unwrap();
        let found = storage.head(path).unwrap().unwrap();
        assert_eq!(found.bytes, content.len() as u64);
        let wanted = vec![5..9, 18 << 20..20 << 20, 3 << 20..12 << 20];
        let ranges = storage.read_ranges(path, found.bytes, wanted, found.e_tag.clone()).unwrap();
        for (start, length) in [(5, 4), (18 << 20, 2 << 20), (3 << 20, 9 << 20)] {
            let read = parquet::file::reader::ChunkReader::get_bytes(&ranges, start as u64, length).unwrap();
            assert!(read == content[start..start + length], "{storage:?}");
        }
        let listed = storage.list("data", None).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].path, path, "{storage:?}");
        let other = Some("another version".to_owned());
        let error = storage.read_ranges(path, found.bytes, vec![0..1, 3..4], other).unwrap_err();
        assert_eq!(error.fault().kind, Kind::Data);
        assert!(error.to_string().contains("was changed while it was read"), "{error}");
        storage.delete(vec![path.to_owned(), "data/none.parquet".to_owned()]).unwrap();
        assert!(storage.list("", None).unwrap().is_empty());
    }
}

#[test]
fn an_upload_that_is_dropped_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(directory.path()).unwrap();
    let mut upload = storage.upload("part.parquet").unwrap();
    upload.write_all(&vec![1; 9 << 20]).unwrap();
    drop(upload);
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_location_that_cannot_be_opened_says_what_to_write() {
    for (location, message) in
        [("ftp://host/folder", "ftp"), ("s3://", "s3://"), ("memory:///folder", "not supported")]
    {
        let error = Storage::open(Path::new(location)).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("hint: "), "{error}");
    }
    for path in ["folder", "./a:b", "/c://d", "C://x"] {
        assert!(Storage::open(Path::new(path)).unwrap().local.is_some(), "{path}");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = fs_err::canonicalize(folder.path()).unwrap();
    let url = Storage::open(Path::new(&format!("file://{}/a%20b", root.display()))).unwrap();
    assert_eq!(url.local.as_deref(), Some(&*root.join("a b")));
}

/// The store and the local paths refer to the same folder, and nothing is written elsewhere.
#[test]
fn a_location_with_parent_folders_is_that_folder() {
    let folder = tempfile::tempdir().unwrap();
    let root = fs_err::canonicalize(folder.path()).unwrap();
    fs_err::create_dir(root.join("work")).unwrap();
    for (number, location) in ["work/../a", "work/./../b/", "work/../c d%20#1?*~/e"].iter().enumerate() {
        let storage = Storage::open(&root.join(location)).unwrap();
        assert_eq!(storage.create("snapshots/1.json", b"first".to_vec()).unwrap(), Created::Yes);
        let mut upload = storage.upload("data/part").unwrap();
        upload.write_all(b"rows").unwrap();
        upload.finish().unwrap();
        assert_eq!(storage.read("data/part").unwrap().unwrap(), "rows");
        let mut listed: Vec<_> = storage.list("", None).unwrap().into_iter().map(|o| o.path).collect();
        listed.sort();
        assert_eq!(listed, ["data/part", "snapshots/1.json"], "{location}");
        let name = ["a", "b", "c d%20#1?*~/e"][number];
        assert_eq!(fs_err::read(root.join(name).join("data/part")).unwrap(), b"rows", "{location}");
    }
    for location in ["/", "//", "/..", "/.", "file:///"] {
        let error = Storage::open(Path::new(location)).unwrap_err().to_string();
        assert!(error.contains("the root of the file system"), "{location}: {error}");
    }
    let error = Storage::open(&root.join("missing/../ds")).unwrap_err().to_string();
    assert!(error.contains("missing/../ds") && error.contains("does not exist"), "{error}");
}

#[test]
fn a_file_is_in_the_folder_that_its_path_names() {
    let folder = tempfile::tempdir().unwrap();
    let root = fs_err::canonicalize(folder.path()).unwrap();
    fs_err::create_dir(root.join("work")).unwrap();
    for (location, place, name) in [
        ("work/file", "work", "file"),
        ("work/../file", "", "file"),
        ("work/..", "", ""),
        ("work/", "work", ""),
        ("new/file", "new", "file"),
    ] {
        let (storage, found) = Storage::of_file(&root.join(location)).unwrap();
        let place = if place.is_empty() { root.clone() } else { root.join(place) };
        assert_eq!((storage.local.as_deref(), &*found), (Some(&*place), name), "{location}");
    }
    for location in ["/file", "file:///file"] {
        let (storage, name) = Storage::of_file(Path::new(location)).unwrap();
        assert_eq!((storage.local.as_deref(), &*name), (Some(Path::new("/")), "file"), "{location}");
    }
    let url = format!("file://{}/work/a%20b", root.display());
    let (storage, name) = Storage::of_file(Path::new(&url)).unwrap();
    assert_eq!((storage.local.as_deref(), &*name), (Some(&*root.join("work")), "a b"));
    let here = fs_err::canonicalize(".").unwrap();
    let (storage, name) = Storage::of_file(Path::new("file")).unwrap();
    assert_eq!((storage.local.as_deref(), &*name), (Some(&*here), "file"));
    assert!(Storage::of_file(Path::new("~/file")).unwrap_err().to_string().contains("$HOME"));
}

/// A failed writer keeps the folder that is the target of the user's link.
#[test]
fn the_target_of_a_link_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs_err::create_dir(&target).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    Storage::open(&link.join("")).unwrap().remove_empty_folders(&["data"]);
    assert!(target.is_dir());
    Storage::open(&target).unwrap().remove_empty_folders(&["data"]);
    assert!(!target.exists());
}

/// A writer that ends removes empty folders, including folders in which another writer is about to create its
/// first file.
#[test]
fn folders_that_are_removed_before_the_first_file_are_created_again() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(&directory.path().join("dataset")).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                storage.remove_empty_folders(&["data", "snapshots"]);
                // Writers end occasionally. Without a pause, every folder could be removed as soon as it is
                // created.
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        });
        let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for n in 0..300 {
                let (created, uploaded) =
                    (format!("snapshots/{n}.json"), format!("data/day={n}/part.parquet"));
                assert_eq!(storage.create(&created, b"first".to_vec()).unwrap(), Created::Yes);
                let mut upload = storage.upload(&uploaded).unwrap();
                upload.write_all(b"rows").unwrap();
                upload.finish().unwrap();
                assert_eq!(storage.read(&created).unwrap().unwrap(), "first");
                assert_eq!(storage.read(&uploaded).unwrap().unwrap(), "rows");
                storage.delete(vec![created, uploaded]).unwrap();
            }
        }));
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        remover.join().unwrap();
        written.unwrap();
    });
}

/// The error must differ from the error that the object's name is taken, after which a writer would try the
/// next number.
#[test]
fn a_file_where_a_folder_should_be_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::open(directory.path()).unwrap();
    fs_err::write(directory.path().join("snapshots"), "a file").unwrap();
    let error = storage.create("snapshots/0.json", b"first".to_vec()).unwrap_err();
    assert!(error.to_string().contains("snapshots/0.json"), "{error}");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_folder_is_removed_with_its_content() {
    let (_directory, storages) = storages();
    for storage in storages {
        for path in ["a/b/one", "a/b/c/two", "a/first", "ab"] {
            storage.replace(path, b"text".to_vec()).unwrap();
        }
        let entries = |folder: &str| {
            let mut names = storage.entries(folder).unwrap();
            names.sort();
            names
        };
        assert_eq!(entries("a"), ["b", "first"], "{storage:?}");
        assert!(entries("x").is_empty());
        storage.remove_folder("a", Some("first")).unwrap();
        storage.remove_folder("a", Some("first")).unwrap();
        storage.remove_folder("x", None).unwrap();
        assert_eq!(entries(""), ["ab"], "{storage:?}");
    }
}

#[test]
fn ranges_and_whole_objects_are_read() {
    let (_directory, storages) = storages();
    let content: Vec<u8> = (0..=250).cycle().take(20 << 20).collect();
    for storage in storages {
        let mut upload = storage.upload_of("part", content.len() as u64).unwrap();
        upload.write_all(&content).unwrap();
        upload.finish().unwrap();
        let object = storage.head("part").unwrap().unwrap();
        for range in [0..5, 7..(19 << 20), (20 << 20) - 1..20 << 20, 9..9] {
            let mut bytes = vec![0; range.len()];
            storage.read_at("part", &object, range.start as u64, &mut bytes).unwrap();
            assert!(bytes == content[range.clone()], "{storage:?}, {range:?}");
        }
        let mut bytes = [0; 2];
        storage.read_at("part", &object, (20 << 20) - 1, &mut bytes).unwrap_err();
        let mut read = Vec::new();
        let keep = |ranges: Ranges| {
            ranges.parts().for_each(|(_, bytes)| read.extend_from_slice(bytes));
            Ok(())
        };
        storage.read_through("part", &object, keep).unwrap();
        assert!(read == content, "{storage:?}");
        assert!(storage.read("part").unwrap().unwrap() == content, "{storage:?}");
    }
}
