//! Which files a worker may open, by landlock.

use super::super::profile::Right;
use super::super::{Plan, Shaders};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use lddtree::DependencyAnalyzer;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The newest landlock that is asked for; a kernel with an older one does what it can.
const ABI_ASKED: ABI = ABI::V6;

/// What a worker reads of itself, by names in /proc/self. Not the folder: it also has the network's interfaces and sockets, and
/// what is mounted.
const OWN: &[&str] = &[
    "auxv",
    "cgroup",
    "cmdline",
    "comm",
    "fd",
    "limits",
    "maps",
    "numa_maps",
    "smaps",
    "stat",
    "statm",
    "status",
];

/// Keeps the inodes of /proc/self, which landlock's rules are tied to, from being made anew.
#[derive(Debug)]
pub(super) struct Pinned {
    _own: Vec<PathFd>,
}

fn own() -> impl Iterator<Item = PathBuf> {
    OWN.iter().map(|name| Path::new("/proc/self").join(name))
}

/// What this kernel lacks, for a line of log.
pub(in super::super) fn missing() -> Option<&'static str> {
    let made = |abi| {
        let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        ruleset.handle_access(AccessFs::from_all(abi)).and_then(Ruleset::create).is_ok()
    };
    match (made(ABI::V1), made(ABI::V5)) {
        (false, _) => Some("this kernel has no landlock, so they can open what their user can"),
        (true, false) => {
            Some("this kernel's landlock is from before Linux 6.10 and does not know all rights")
        }
        (true, true) => None,
    }
}

/// Leaves the calling thread what the plan says; nothing is left out on a kernel without landlock.
pub(super) fn restrict(plan: &Plan<'_>) -> Result<Pinned, String> {
    let pinned = own().filter_map(|path| PathFd::new(path).ok()).collect();
    let rules = rules(plan);
    let restricted = ruleset().and_then(|mut ruleset| {
        for (path, access) in &rules {
            // What is not there, or not to be reached, needs no right.
            let Ok(file) = PathFd::new(path) else { continue };
            let access = if path.is_dir() { *access } else { *access & AccessFs::from_file(ABI_ASKED) };
            ruleset = ruleset.add_rule(PathBeneath::new(file, access))?;
        }
        ruleset.restrict_self()
    });
    restricted.map(|_| Pinned { _own: pinned }).map_err(|error| error.to_string())
}

/// Everything is refused that no rule allows: files, TCP ports, sockets in the abstract name space, signals to others.
fn ruleset() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .handle_access(AccessFs::from_all(ABI_ASKED))?
        .handle_access(AccessNet::from_all(ABI_ASKED))?
        .scope(Scope::from_all(ABI_ASKED))?
        .create()
}

type Rule = (PathBuf, BitFlags<AccessFs>);

fn rules(plan: &Plan<'_>) -> Vec<Rule> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let device = read | AccessFs::WriteFile | AccessFs::IoctlDev;
    let mut rules: Vec<Rule> = Vec::new();
    for right in plan.profile.rights(plan.card_nodes) {
        let (pattern, access) = match right {
            Right::Read(pattern) => (pattern, read),
            Right::List(pattern) => (pattern, AccessFs::ReadDir.into()),
            Right::Device(pattern) => (pattern, device),
        };
        rules.extend(matching(pattern).into_iter().map(|path| (path, access)));
    }
    let covered: Vec<PathBuf> = rules.iter().filter_map(|(path, _)| path.canonicalize().ok()).collect();
    let others = own().chain(cgroup_quotas()).chain(plan.read.to_vec());
    let found = others.chain(libraries(plan, &covered)).chain(drivers());
    rules.extend(found.map(|path| (path, read)));
    match &plan.shaders {
        Shaders::None => {}
        Shaders::Read(folder) => rules.push((folder.clone(), read)),
        Shaders::Write(folder) => {
            let write = AccessFs::WriteFile | AccessFs::Truncate | AccessFs::MakeReg | AccessFs::MakeDir;
            rules.push((folder.clone(), read | write | AccessFs::RemoveFile | AccessFs::RemoveDir));
        }
    }
    rules
}

/// The paths that a pattern names.
fn matching(pattern: &str) -> Vec<PathBuf> {
    let Some(start) = pattern.strip_suffix('*') else {
        return vec![pattern.into()];
    };
    let Some((folder, start)) = start.rsplit_once('/') else { return Vec::new() };
    let folder = if folder.is_empty() { "/" } else { folder };
    entries(Path::new(folder), |name| name.starts_with(start.as_bytes()))
}

/// The plugin, the ggml library and what they are linked to, and the libraries in the folders of these and in those that the
/// loader looks into: drivers open some by themselves. Folders that are covered as a whole are left out.
fn libraries(plan: &Plan<'_>, covered: &[PathBuf]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = plan.libraries.iter().map(|&path| path.to_owned()).collect();
    found.extend(plan.libraries.iter().flat_map(|path| linked(path)));
    // A library's neighbours are those of its name and those of the file behind it.
    let whole: Vec<PathBuf> = found.iter().filter_map(|path| path.canonicalize().ok()).collect();
    found.extend(whole);
    let mut folders: Vec<PathBuf> = found.iter().cloned().filter_map(parent).collect();
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    // The loader separates them by semicolons too.
    let given = variable.as_bytes().split(|byte| matches!(byte, b':' | b';'));
    folders
        .extend(given.filter(|path| !path.is_empty()).map(|path| OsString::from_vec(path.to_vec()).into()));
    for file in entries(Path::new("/etc/ld.so.conf.d"), |name| name.ends_with(b".conf")) {
        let lines = fs::read_to_string(file).unwrap_or_default();
        folders.extend(lines.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from));
    }
    let mut folders: Vec<PathBuf> = folders.iter().filter_map(|folder| folder.canonicalize().ok()).collect();
    folders.sort();
    folders.dedup();
    folders.retain(|folder| !covered.iter().any(|root| folder.starts_with(root)));
    for folder in folders {
        found.extend(shared_objects(&folder));
        found.push(folder.join("glibc-hwcaps"));
    }
    found
}

/// The libraries that one is linked to, directly or not; of what is no library, none.
fn linked(library: &Path) -> Vec<PathBuf> {
    let Ok(library) = library.canonicalize() else { return Vec::new() };
    // The crate takes paths for text; a folder of another name is reached by its descriptor.
    let folder =
        library.parent().filter(|_| library.to_str().is_none()).and_then(|path| fs::File::open(path).ok());
    let path = match (&folder, library.file_name().and_then(OsStr::to_str)) {
        (None, _) => library,
        (Some(folder), Some(name)) => format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()).into(),
        (Some(_), None) => return Vec::new(),
    };
    let tree = DependencyAnalyzer::default().analyze(path).ok();
    let found =
        tree.into_iter().flat_map(|tree| tree.libraries.into_values()).filter(|library| library.found());
    // Their names are good for as long as the folder is open.
    let real = |path: PathBuf| if folder.is_some() { path.canonicalize().ok() } else { Some(path) };
    found.filter_map(|library| real(library.path)).collect()
}

/// Manifests of Vulkan drivers that variables name, and the libraries beside them.
fn drivers() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for name in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"] {
        let value = std::env::var_os(name).unwrap_or_default();
        for manifest in std::env::split_paths(&value).filter(|path| path.is_absolute()) {
            found.extend(parent(manifest.clone()).into_iter().flat_map(|folder| shared_objects(&folder)));
            found.push(manifest);
        }
    }
    found
}

/// The files that tell how much of the processor this process gets: its cgroup's, and those above it.
fn cgroup_quotas() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Vec::new();
    };
    let root = Path::new("/sys/fs/cgroup");
    let folder = root.join(path);
    folder
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .map(|folder| folder.join("cpu.max"))
        .collect()
}

/// The libraries in a folder, which are files: the folder may be one that has everything of its user's.
fn shared_objects(folder: &Path) -> Vec<PathBuf> {
    entries(folder, is_of_library).into_iter().filter(|path| path.is_file()).collect()
}

/// Whether a name is that of a library, with a version or without: `libcuda.so`, `libcrypto.so.1.0.2k`.
fn is_of_library(name: &[u8]) -> bool {
    let ends_so = |at: usize| {
        let version = name[at..].strip_prefix(b".so");
        version.is_some_and(|version| match version {
            [] => true,
            [b'.', first, rest @ ..] => {
                first.is_ascii_digit()
                    && rest.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte))
            }
            _ => false,
        })
    };
    (1..name.len()).any(ends_so)
}

fn parent(path: PathBuf) -> Option<PathBuf> {
    let folder = path.parent()?;
    Some(if folder.as_os_str().is_empty() { ".".into() } else { folder.to_owned() })
}

fn entries(folder: &Path, wanted: impl Fn(&[u8]) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| wanted(entry.file_name().as_bytes())).map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_what_begins_so() {
        assert_eq!(matching("/proc/stat"), [Path::new("/proc/stat")]);
        let found = matching("/proc/self/ma*");
        assert!(
            found.contains(&"/proc/self/maps".into()) && !found.contains(&"/proc/self/stat".into()),
            "{found:?}"
        );
        assert!(matching("/us*").contains(&"/usr".into()));
        assert!(matching("/nonexistent/*").is_empty());
    }

    #[test]
    fn s29_a_library_s_folder_gives_its_libraries_only() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libggml-cpu.so", "libggml-base.so.0", "secret.txt", "keys.sops.yaml", "a.sock"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        for name in [".solana", ".so", "lib.so", "lib.so.1"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        std::os::unix::fs::symlink(folder.path(), folder.path().join("all.so")).unwrap();
        let library = folder.path().join("libggml-cpu.so");
        let plan = Plan {
            profile: super::super::super::Profile::Cpu,
            libraries: vec![&library],
            read: &[],
            card_nodes: false,
            shaders: Shaders::None,
        };
        let paths: Vec<PathBuf> = rules(&plan).into_iter().map(|(path, _)| path).collect();
        let here: Vec<_> = paths.iter().filter(|path| path.starts_with(folder.path())).collect();
        assert!(
            here.contains(&&library) && here.contains(&&folder.path().join("libggml-base.so.0")),
            "{here:?}"
        );
        let libraries =
            [library.clone(), folder.path().join("libggml-base.so.0"), folder.path().join("glibc-hwcaps")];
        assert!(here.iter().all(|path| libraries.contains(path)), "{here:?}");
        assert!(is_of_library(b"libcrypto.so.1.0.2k") && is_of_library(b"libLLVM-19.so"));
    }
}
