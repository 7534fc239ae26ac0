//! From an order to the gate's instruction: environment, program, and words for what is wrong with them.
//!
//! Invariant: what comes out carries its own launch id, whatever the manifest or the inherited environment say.
#![expect(
    clippy::disallowed_methods,
    reason = "reads the inherited environment, the files of `valueFrom`, and whether a program can be executed"
)]

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::AccessFlags;

use super::gate::{GateError, INSTANCE_VARIABLE, Instruction, OWN_PROGRAM, Octets, Step};
use super::logs::Logs;
use super::redact::is_secret_name;
use crate::failure::LaunchFailure;
use crate::order::{LaunchOrder, Program};
use crate::procfs::LAUNCH_ID_VARIABLE;
use crate::spec::{EnvValue, EnvVar};

/// Where programs are looked for when the environment has no PATH: what a login shell of Debian begins with.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The largest value that is read from a file: the kernel takes no variable longer than 128 KiB.
const VALUE_LIMIT: u64 = 128 << 10;

/// The longest folder that an engine is given as TMPDIR. A socket's path has at most 107 bytes, and vLLM's sockets have
/// names of 37 (`/` and a UUID): in a deeper folder it cannot start. Then it is better off with the system's own, where it
/// may leave something behind.
const TMPDIR_LIMIT: usize = 70;

/// Inherited variables that would mislead an engine (P3): devices and ports that are not its own, the service manager's
/// messages to *us*, and `PYTHONDONTWRITEBYTECODE`, which costs vLLM 45 s at each start.
const SCRUBBED: [&str; 6] = [
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "VLLM_PORT",
    "PORT",
    "NOTIFY_SOCKET",
    "PYTHONDONTWRITEBYTECODE",
];

/// Prefixes of such variables. `WATCHDOG_` goes with `NOTIFY_SOCKET`.
const SCRUBBED_PREFIXES: [&str; 4] = ["ROCR_", "LISTEN_", "EVENKEEL_", "WATCHDOG_"];

/// Why an order cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub enum OrderError {
    /// A value could not be read from its file.
    #[error("the value of {name} could not be read from {}: {source}", .path.display())]
    Value {
        /// Of which variable.
        name: String,
        /// From which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A program without `/` is nowhere in PATH.
    #[error("{name}: not found in PATH ({})", .path.display())]
    NotInPath {
        /// Which.
        name: String,
        /// The PATH that was searched.
        path: PathBuf,
    },
    /// There is no such file.
    #[error("{}: not found", .0.display())]
    NotFound(PathBuf),
    /// There is one, and it cannot be executed.
    #[error("{}: not executable", .0.display())]
    NotExecutable(PathBuf),
    /// Something that the system's calls cannot take.
    #[error("{0} holds a zero byte")]
    ZeroByte(String),
}

/// What an order comes to.
pub struct Assembled {
    /// For the gate.
    pub instruction: Instruction,
    /// For whoever has to say what went wrong.
    pub names: Names,
}

/// The paths that messages name. No secrets.
#[derive(Debug, Clone)]
pub struct Names {
    program: PathBuf,
    working_dir: PathBuf,
    log: PathBuf,
    arguments: usize,
    /// Of arguments and environment.
    bytes: usize,
}

/// Reads, resolves and puts together. `inherited` is the controller's own environment.
pub fn assemble(
    order: &LaunchOrder,
    logs: &Logs,
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Assembled, OrderError> {
    let tmp = logs.tmp(&order.instance);
    let environment = environment(order, &tmp, inherited)?;
    let working_dir = order.working_dir.clone().unwrap_or(tmp);
    let (program, own_name) = match &order.program {
        Program::Own => (PathBuf::from(OWN_PROGRAM), OsString::from("evenkeel")),
        Program::Named(name) => (
            resolve(name, environment.get(OsStr::new("PATH")), &working_dir)?,
            OsString::from(name),
        ),
    };
    let log = logs.current(&order.instance);
    let arguments: Vec<Octets> = std::iter::once(own_name)
        .chain(order.arguments.iter().map(OsString::from))
        .map(Octets)
        .collect();
    let environment: Vec<Octets> = environment
        .into_iter()
        .map(|(name, value)| {
            let mut variable = name;
            variable.push("=");
            variable.push(value);
            Octets(variable)
        })
        .collect();
    let length = |texts: &[Octets]| texts.iter().map(|text| text.0.len() + 1).sum::<usize>();
    if arguments.iter().any(|text| text.0.as_bytes().contains(&0)) {
        return Err(OrderError::ZeroByte("an argument".to_owned()));
    }
    Ok(Assembled {
        names: Names {
            program: program.clone(),
            working_dir: working_dir.clone(),
            log: log.clone(),
            arguments: arguments.len(),
            bytes: length(&arguments) + length(&environment),
        },
        instruction: Instruction {
            program: program.into(),
            arguments,
            environment,
            working_dir: working_dir.into(),
            log: log.into(),
        },
    })
}

/// The engine's environment. From weakest to strongest: what is inherited, less what misleads; a temporary folder of its
/// own; the order's, of which later entries win; who it is.
fn environment(
    order: &LaunchOrder,
    tmp: &Path,
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<BTreeMap<OsString, OsString>, OrderError> {
    let mut environment: BTreeMap<OsString, OsString> = inherited
        .into_iter()
        .filter(|(name, _)| !is_scrubbed(name))
        .collect();
    if tmp.as_os_str().len() <= TMPDIR_LIMIT {
        environment.insert("TMPDIR".into(), tmp.into());
    }
    for variable in &order.environment {
        let value = match &variable.value {
            EnvValue::Literal(value) => OsString::from(value),
            EnvValue::File(path) => read_value(variable, path)?.into(),
        };
        if value.as_bytes().contains(&0) {
            return Err(OrderError::ZeroByte(format!(
                "the value of {}",
                variable.name
            )));
        }
        environment.insert(OsString::from(&variable.name), value);
    }
    environment.insert(
        LAUNCH_ID_VARIABLE.into(),
        order.launch_id.to_string().into(),
    );
    environment.insert(INSTANCE_VARIABLE.into(), order.instance.to_string().into());
    Ok(environment)
}

fn is_scrubbed(name: &OsStr) -> bool {
    SCRUBBED.iter().any(|scrubbed| name == *scrubbed)
        || SCRUBBED_PREFIXES
            .iter()
            .any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
}

/// A value from its file, less one trailing line end.
fn read_value(variable: &EnvVar, path: &Path) -> Result<String, OrderError> {
    let read = || -> io::Result<String> {
        let file = std::fs::File::open(path)?;
        let mut value = String::new();
        let length = file.take(VALUE_LIMIT + 1).read_to_string(&mut value)?;
        if length as u64 > VALUE_LIMIT {
            return Err(io::Error::other("it is larger than 128 KiB"));
        }
        let end = value.strip_suffix('\n').unwrap_or(&value);
        Ok(end.strip_suffix('\r').unwrap_or(end).to_owned())
    };
    read().map_err(|source| OrderError::Value {
        name: variable.name.clone(),
        path: path.to_owned(),
        source,
    })
}

/// The values that must not be shown: those from files, and those written out under the name of a secret. An error if
/// one cannot be read: then nobody can tell whether it is in a text.
pub fn secrets(env: &[EnvVar]) -> Result<Vec<String>, OrderError> {
    let mut secrets = Vec::new();
    for variable in env {
        match &variable.value {
            EnvValue::File(path) => secrets.push(read_value(variable, path)?),
            EnvValue::Literal(value) if is_secret_name(&variable.name) => {
                secrets.push(value.clone());
            }
            EnvValue::Literal(_) => {}
        }
    }
    Ok(secrets)
}

/// Finds the program as the engine's own PATH would: the first that can be executed.
fn resolve(name: &str, path: Option<&OsString>, working_dir: &Path) -> Result<PathBuf, OrderError> {
    if name.contains('\0') {
        return Err(OrderError::ZeroByte("the program's path".to_owned()));
    }
    if name.contains('/') {
        // Relative to where it will run.
        let file = working_dir.join(name);
        return match look_at(&file) {
            Found::Executable => Ok(file),
            Found::Other => Err(OrderError::NotExecutable(file)),
            Found::Nothing => Err(OrderError::NotFound(file)),
        };
    }
    let path = path.map_or(OsStr::new(DEFAULT_PATH), OsString::as_os_str);
    let mut refused = None;
    // An empty name would find the folders themselves.
    let folders = std::env::split_paths(path).filter(|_| !name.is_empty());
    for folder in folders {
        let file = working_dir.join(folder).join(name);
        match look_at(&file) {
            Found::Executable => return Ok(file),
            Found::Other => refused = refused.or(Some(file)),
            Found::Nothing => {}
        }
    }
    Err(match refused {
        Some(file) => OrderError::NotExecutable(file),
        None => OrderError::NotInPath {
            name: name.to_owned(),
            path: path.into(),
        },
    })
}

enum Found {
    Executable,
    Other,
    Nothing,
}

fn look_at(file: &Path) -> Found {
    match std::fs::metadata(file) {
        Ok(metadata) if metadata.is_file() => {
            if nix::unistd::access(file, AccessFlags::X_OK).is_ok() {
                Found::Executable
            } else {
                Found::Other
            }
        }
        Ok(_) => Found::Other,
        // Behind a folder that may not be entered.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Found::Other,
        Err(_) => Found::Nothing,
    }
}

impl Names {
    /// What went wrong at the gate, in words that name the path (P4).
    pub fn explain(&self, error: &GateError) -> LaunchFailure {
        LaunchFailure::SpawnFailed {
            detail: self.detail(error),
        }
    }

    fn detail(&self, error: &GateError) -> String {
        let GateError::Step(failure) = error else {
            return error.to_string();
        };
        let errno = failure.errno();
        let program = self.program.display();
        let folder = self.working_dir.display();
        match (failure.step, errno) {
            (Step::WorkingDir, Errno::ENOENT) => format!("no such working directory: {folder}"),
            (Step::WorkingDir, Errno::ENOTDIR) => {
                format!("the working directory {folder} is not a folder")
            }
            (Step::WorkingDir, _) => {
                format!(
                    "the working directory {folder} cannot be entered: {}",
                    errno.desc()
                )
            }
            (Step::Log, _) => format!(
                "the log {} could not be opened: {}",
                self.log.display(),
                errno.desc()
            ),
            // It was there a moment ago, so what is missing is the program that is to read it.
            (Step::Exec, Errno::ENOENT) if self.program.exists() => {
                format!("{program}: its interpreter was not found")
            }
            (Step::Exec, Errno::ENOENT) => format!("{program}: not found"),
            (Step::Exec, Errno::EACCES) => format!("{program}: not executable"),
            (Step::Exec, Errno::ENOEXEC) => {
                format!(
                    "{program}: not executable: no program of this machine's kind, and no script with `#!`"
                )
            }
            (Step::Exec, Errno::E2BIG) => format!(
                "argument list too long: {program} with {} arguments; with the environment {} bytes",
                self.arguments, self.bytes
            ),
            (Step::Exec, _) => format!("{program}: {}", errno.desc()),
            (Step::Instruction | Step::Session | Step::Descriptors | Step::Signals, _) => {
                error.to_string()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;
    use uuid::Uuid;

    fn order(environment: Vec<EnvVar>) -> LaunchOrder {
        let instance: crate::names::InstanceName = "a-0".parse().unwrap();
        LaunchOrder {
            launch_id: crate::names::LaunchId::derive(Uuid::from_u128(1), &instance),
            instance,
            program: Program::Own,
            arguments: vec!["echo".to_owned()],
            environment,
            working_dir: None,
            port: None,
            timeout: Duration::from_secs(1),
        }
    }

    fn literal(name: &str, value: &str) -> EnvVar {
        EnvVar {
            name: name.to_owned(),
            value: EnvValue::Literal(value.to_owned()),
        }
    }

    fn inherited(names: &[&str]) -> Vec<(OsString, OsString)> {
        names
            .iter()
            .map(|name| (OsString::from(name), OsString::from("inherited")))
            .collect()
    }

    #[test]
    fn misleading_variables_are_not_inherited() {
        let order = order(Vec::new());
        let given = inherited(&[
            "CUDA_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "VLLM_PORT",
            "PORT",
            "NOTIFY_SOCKET",
            "LISTEN_FDS",
            "LISTEN_PID",
            "EVENKEEL_STATE_DIR",
            "EVENKEEL_LAUNCH_ID",
            "PYTHONDONTWRITEBYTECODE",
            "PATH",
            "REPORT",
            "HF_HOME",
        ]);
        let environment = environment(&order, Path::new("/tmp/a-0"), given).unwrap();
        let names: Vec<&str> = environment
            .keys()
            .filter_map(|name| name.to_str())
            .collect();
        assert_eq!(
            names,
            [
                "EVENKEEL_INSTANCE",
                "EVENKEEL_LAUNCH_ID",
                "HF_HOME",
                "PATH",
                "REPORT",
                "TMPDIR"
            ]
        );
    }

    #[test]
    fn later_entries_win_and_nobody_wins_over_the_launch_id() {
        let order = order(vec![
            literal("CUDA_VISIBLE_DEVICES", "7"),
            literal("TMPDIR", "/mine"),
            literal("EVENKEEL_LAUNCH_ID", "forged"),
            literal("CUDA_VISIBLE_DEVICES", "0,1"),
        ]);
        let environment =
            environment(&order, Path::new("/tmp/a-0"), inherited(&["TMPDIR"])).unwrap();
        let value = |name: &str| environment[OsStr::new(name)].to_str().unwrap().to_owned();
        assert_eq!(value("CUDA_VISIBLE_DEVICES"), "0,1");
        assert_eq!(value("TMPDIR"), "/mine");
        assert_eq!(value("EVENKEEL_LAUNCH_ID"), order.launch_id.to_string());
    }

    #[test]
    fn a_temporary_folder_too_deep_for_sockets_is_not_given() {
        let order = order(Vec::new());
        let given = |length: usize| {
            let tmp = PathBuf::from(format!("/{}", "x".repeat(length - 1)));
            environment(&order, &tmp, [])
                .unwrap()
                .contains_key(OsStr::new("TMPDIR"))
        };
        assert!(given(70) && !given(71));
    }

    #[test]
    fn values_are_read_from_files_at_each_launch() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let variable = EnvVar {
            name: "HF_TOKEN".to_owned(),
            value: EnvValue::File(path.clone()),
        };
        let missing = read_value(&variable, &path).unwrap_err().to_string();
        assert!(
            missing.contains("HF_TOKEN") && missing.contains("token:"),
            "{missing}"
        );
        for (written, read) in [("a b\n", "a b"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("", "")] {
            std::fs::write(&path, written).unwrap();
            assert_eq!(read_value(&variable, &path).unwrap(), read);
        }
        std::fs::write(&path, vec![b'a'; 200 << 10]).unwrap();
        assert!(read_value(&variable, &path).is_err());
        std::fs::write(&path, "a\0b").unwrap();
        let error = environment(&order(vec![variable]), folder.path(), []).unwrap_err();
        assert!(matches!(error, OrderError::ZeroByte(_)));
    }

    #[test]
    fn what_must_not_be_shown_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("value");
        std::fs::write(&path, "from a file\n").unwrap();
        let file = |path: &Path| EnvVar {
            name: "PLAIN_NAME".to_owned(),
            value: EnvValue::File(path.to_owned()),
        };
        let env = [
            literal("HF_TOKEN", "written"),
            literal("MODE", "fast"),
            file(&path),
        ];
        assert_eq!(secrets(&env).unwrap(), ["written", "from a file"]);
        assert!(secrets(&[file(&folder.path().join("missing"))]).is_err());
    }

    #[test]
    fn not_found_and_not_executable_are_told_apart_with_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("bin")).unwrap();
        std::fs::create_dir(at("bin/folder")).unwrap();
        for (name, mode) in [("bin/tool", 0o755), ("bin/text", 0o644)] {
            std::fs::write(at(name), "").unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let path = OsString::from(format!("/nowhere:{}", at("bin").display()));
        let resolved = |name: &str| {
            resolve(name, Some(&path), folder.path())
                .map(|path| path.display().to_string())
                .map_err(|error| error.to_string())
        };
        let shown = |name: &str| at(name).display().to_string();
        assert_eq!(resolved("tool"), Ok(shown("bin/tool")));
        assert_eq!(resolved("bin/tool"), Ok(shown("bin/tool")));
        assert_eq!(
            resolved("text"),
            Err(format!("{}: not executable", shown("bin/text")))
        );
        assert_eq!(
            resolved("folder"),
            Err(format!("{}: not executable", shown("bin/folder")))
        );
        assert_eq!(
            resolved("/nowhere/x"),
            Err("/nowhere/x: not found".to_owned())
        );
        assert_eq!(
            resolved("missing"),
            Err(format!(
                "missing: not found in PATH (/nowhere:{})",
                shown("bin")
            ))
        );
        assert!(resolved("").unwrap_err().contains("not found in PATH"));
        assert!(resolve("sh", None, folder.path()).is_ok());
    }
}
