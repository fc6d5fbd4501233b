use super::*;

#[test]
fn a_file_is_replaced_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    write_atomically(&path, b"old").unwrap();
    write_atomically(&path, b"new").unwrap();
    assert_eq!(fs_err::read(&path).unwrap(), b"new");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn links_and_pipes_are_not_replaced() {
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let directory = tempfile::tempdir().unwrap();
    let [path, link, pipe] = ["file", "link", "pipe"].map(|name| directory.path().join(name));
    fs_err::write(&path, b"old").unwrap();
    symlink(&path, &link).unwrap();
    write_atomically(&link, b"new").unwrap();
    assert_eq!(fs_err::read(&path).unwrap(), b"new");
    assert!(fs_err::symlink_metadata(&link).unwrap().is_symlink());
    mknodat(CWD, pipe.as_path(), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // Linux opens both ends of a pipe without waiting.
    let mut ends = fs_err::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    write_atomically(&pipe, b"new").unwrap();
    assert!(fs_err::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    let mut bytes = [0; 3];
    ends.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"new");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 3);
}

#[test]
fn a_file_at_a_location_that_is_no_local_path_is_refused() {
    for (path, message) in [
        ("~/page.html", "did not expand `~`"),
        ("s3:/b/page.html", "two slashes"),
        ("s3://b/page.html", "local disk"),
    ] {
        let written = write_atomically(Path::new(path), b"page").unwrap_err().fault();
        let checked = check_output(Path::new(path)).unwrap_err().fault();
        for fault in [written, checked] {
            let text = fault.to_string();
            assert!(text.contains(message) && text.contains(path) && !fault.hints.is_empty(), "{text}");
        }
    }
}

#[test]
fn outputs_are_checked_before_the_work() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs_err::write(path("file"), "old").unwrap();
    std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
    for name in ["file", "link", "new"] {
        check_output(&path(name)).unwrap();
    }
    check_output(Path::new("/dev/null")).unwrap();
    assert_eq!(fs_err::read_to_string(path("file")).unwrap(), "old");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 2);
    for (name, message) in [
        ("", "this is a directory, not a file\n  hint: give the name of a file"),
        ("none/new", "none`: there is no such directory to write into\n  hint: create it, or"),
    ] {
        let error = check_output(&path(name)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    // Not even root may create a file there.
    let error = check_output(Path::new("/proc/new")).unwrap_err().to_string();
    assert!(error.contains("`/proc/new` cannot be written: "), "{error}");
}

/// Returns methods of naming a file, for file systems with fewer and fewer capabilities.
fn namings() -> [Naming; 4] {
    use rustix::io::Errno;
    let full = Naming::default();
    let no_links = Naming { link: |_, _| Err(Errno::PERM.into()), ..full };
    let neither =
        Naming { link: |_, _| Err(Errno::OPNOTSUPP.into()), rename: |_, _| Err(Errno::NOSYS.into()), ..full };
    let old_kernel = Naming { rename: |_, _| Err(io::ErrorKind::Unsupported.into()), ..no_links };
    [full, no_links, neither, old_kernel]
}

#[test]
fn a_file_is_created_once_also_without_hard_links() {
    for naming in namings() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("folder/file");
        assert_eq!(create_file_by(&naming, &path, b"first").unwrap(), Created::Yes);
        assert_eq!(create_file_by(&naming, &path, b"second").unwrap(), Created::Exists);
        assert_eq!(fs_err::read(&path).unwrap(), b"first");
        assert_eq!(fs_err::read_dir(parent(&path)).unwrap().count(), 1);
    }
}

#[test]
fn one_of_many_writers_creates_a_file_also_without_hard_links() {
    for naming in namings() {
        let directory = tempfile::tempdir().unwrap();
        let create = |writer: u8| {
            let path = |n: u8| directory.path().join(n.to_string());
            let created = |n: u8| create_file_by(&naming, &path(n), &[n, writer]).unwrap();
            (0..20).filter(|n| created(*n) == Created::Yes).count()
        };
        let create = &create;
        let created: usize = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8).map(|writer| scope.spawn(move || create(writer))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        });
        assert_eq!(created, 20);
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 20);
    }
}

/// Other errors of the system do not count as a missing capability.
#[test]
fn a_full_disk_is_not_mistaken_for_missing_hard_links() {
    use rustix::io::Errno;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let full = Naming { link: |_, _| Err(Errno::NOSPC.into()), ..Naming::default() };
    let error = create_file_by(&full, &path, b"text").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
}

/// A killed writer leaves its claim but no file. No other writer gets the name before the claim is removed.
#[test]
fn a_claim_of_a_killed_writer_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let naming = Naming { patience: Duration::from_millis(50), ..namings()[2] };
    let claim = directory.path().join(".file.claim.tmp");
    fs_err::write(&claim, b"").unwrap();
    let error = create_file_by(&naming, &path, b"text").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
    let error = Error::write(&path, error).to_string();
    assert!(error.contains(".file.claim.tmp") && error.contains("hint: if no other writer"), "{error}");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1, "only the claim is left");
    fs_err::remove_file(&claim).unwrap();
    assert_eq!(create_file_by(&naming, &path, b"text").unwrap(), Created::Yes);
}

#[test]
fn a_failed_rename_leaves_no_temporary_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    // A rename cannot replace a folder that is not empty.
    fs_err::create_dir_all(path.join("thesis")).unwrap();
    assert!(write_atomically(&path, b"new").is_err());
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_staged_directory_appears_only_at_commit() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    drop(StagedDirectory::create(&target, "marker", false).unwrap());
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
    let staged = StagedDirectory::create(&target, "marker", false).unwrap();
    fs_err::write(staged.path().join("marker"), b"1").unwrap();
    assert!(!target.exists());
    staged.commit().unwrap();
    assert!(target.join("marker").is_file());
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn the_target_of_a_link_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (target, link) = (directory.path().join("disk/out"), directory.path().join("out"));
    fs_err::create_dir_all(&target).unwrap();
    std::os::unix::fs::symlink("disk/out", &link).unwrap();
    for (overwrite, text) in [(false, "old"), (true, "new")] {
        let staged = StagedDirectory::create(&link, "marker", overwrite).unwrap();
        fs_err::write(staged.path().join("marker"), text).unwrap();
        staged.commit().unwrap();
        assert!(fs_err::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs_err::read_to_string(target.join("marker")).unwrap(), text);
        assert_eq!(fs_err::read_dir(directory.path().join("disk")).unwrap().count(), 1);
    }
}

#[test]
fn a_folder_around_the_working_directory_is_not_replaced() {
    for location in [".", "./", "..", "/"] {
        let error = StagedDirectory::create(Path::new(location), "marker", true).err().unwrap().to_string();
        assert!(error.contains(&format!("`{location}`: the working directory is in this folder")), "{error}");
    }
}

#[test]
fn a_url_does_not_become_a_local_directory() {
    for (target, message) in [
        ("s3://bucket/logs", "local disk"),
        ("file:///logs", "local disk"),
        ("s3:/bucket/logs", "s3://bucket"),
    ] {
        let error = StagedDirectory::create(Path::new(target), "marker", false).err().unwrap().to_string();
        assert!(error.contains(target) && error.contains(message), "{error}");
    }
    assert!(!Path::new("s3:").exists() && !Path::new("file:").exists());
}

#[test]
fn one_directory_is_staged_once_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("a/b");
    let first = StagedDirectory::create(&target, "marker", false).unwrap();
    let second = StagedDirectory::create(&target, "marker", false);
    assert!(matches!(second, Err(Error::Locked { path }) if path == target));
    drop(first);
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0, "the folder on the way is left");
    // Left-over files of a killed process are removed.
    fs_err::create_dir_all(directory.path().join(".out.partial")).unwrap();
    fs_err::write(directory.path().join(".out.partial/half"), b"1").unwrap();
    let staged = StagedDirectory::create(&directory.path().join("out"), "marker", false).unwrap();
    assert!(!staged.path().join("half").exists());
}

#[test]
fn only_a_directory_with_the_marker_is_replaced_and_only_with_overwrite() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    fs_err::create_dir(&target).unwrap();
    fs_err::write(target.join("thesis.txt"), b"years of work").unwrap();
    let error = StagedDirectory::create(&target, "marker", true).unwrap_err();
    assert!(error.to_string().contains("it holds no `marker`"), "{error}");
    fs_err::write(target.join("marker"), b"1").unwrap();
    let error = StagedDirectory::create(&target, "marker", false).unwrap_err();
    assert!(error.to_string().contains("replace it with the option `overwrite`"), "{error}");
    StagedDirectory::create(&target, "marker", true).unwrap().commit().unwrap();
    assert!(!target.join("thesis.txt").exists());
}

fn unsupported(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Creates an output in `directory` with this text in its marker.
fn output(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs_err::create_dir(&path).unwrap();
    fs_err::write(path.join("marker"), text).unwrap();
    path
}

fn marker(output: &Path) -> String {
    fs_err::read_to_string(output.join("marker")).unwrap()
}

#[test]
fn an_old_directory_is_replaced_with_and_without_an_exchange() {
    for exchange in [exchange_names, unsupported] {
        let directory = tempfile::tempdir().unwrap();
        let target = output(directory.path(), "out", "old");
        let staged = StagedDirectory::create(&target, "marker", true).unwrap();
        fs_err::write(staged.path().join("marker"), "new").unwrap();
        assert_eq!(marker(&target), "old");
        staged.commit_by(exchange).unwrap();
        assert_eq!(marker(&target), "new");
        assert_eq!(fs_err::read_dir(&target).unwrap().count(), 1);
        assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
    }
}

/// Otherwise the other writer could lose its lock or its files to this one.
#[test]
fn no_other_writer_starts_while_a_directory_is_put_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let target = output(directory.path(), "out", "old");
    let staged = StagedDirectory::create(&target, "marker", true).unwrap();
    fs_err::write(staged.path().join("marker"), "new").unwrap();
    let exchange = |staging: &Path, target: &Path| {
        let is_locked = || {
            let other = StagedDirectory::create(target, "marker", true);
            matches!(other, Err(Error::Locked { path }) if path == target)
        };
        assert!(is_locked());
        fs_err::rename(target, staging.with_extension("old"))?;
        fs_err::rename(staging, target)?;
        assert!(is_locked(), "after the rename");
        fs_err::rename(staging.with_extension("old"), staging)
    };
    staged.commit_by(exchange).unwrap();
    assert_eq!(marker(&target), "new");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_kill_between_two_renames_loses_no_output() {
    let directory = tempfile::tempdir().unwrap();
    let (target, aside) = (directory.path().join("out"), output(directory.path(), ".out.previous", "old"));
    output(directory.path(), ".out.partial", "new");
    let refused = StagedDirectory::create(&target, "marker", false).unwrap_err();
    assert!(refused.to_string().contains("already exists"), "{refused}");
    assert_eq!(marker(&target), "old");
    // The process was killed after both renames: the new output has its final name.
    fs_err::rename(&target, &aside).unwrap();
    output(directory.path(), "out", "new");
    drop(StagedDirectory::create(&target, "marker", true).unwrap());
    assert_eq!(marker(&target), "new");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
    // The second rename fails.
    replace(unsupported, &directory.path().join("missing"), &target).unwrap_err();
    assert_eq!(marker(&target), "new");
    assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 1);
}
