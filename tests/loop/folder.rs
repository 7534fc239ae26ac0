//! What is broken or away is never taken for removed.

use std::fs;

use crate::support::daemon::{Daemon, echo, instances, item, pid_of};
use crate::support::http::get;
use crate::support::process::{free_port, is_alive};

/// Line 4, column 3: the name. Line 6, column 11: what is broken.
fn broken(name: &str) -> String {
    format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: {name}\nspec:\n  engine: ecko\n"
    )
}

#[test]
fn the_good_files_beside_a_broken_one_run_and_the_broken_one_is_reported() {
    let daemon = Daemon::start(&[]);
    daemon.put("a.yaml", &echo("a", free_port(), ""));
    daemon.put("broken.yaml", &broken("b"));
    daemon.put("c.yaml", &echo("c", free_port(), ""));
    daemon.ready("a");
    daemon.ready("c");
    let told = daemon.wait_for_event("b", "ManifestInvalid");
    assert!(told.contains("broken.yaml:6:11"), "{told}");

    let seen = daemon.get();
    assert!(item(&seen, "b").is_none());
    let problem = &seen["problems"][0];
    assert_eq!(problem["file"], "broken.yaml");
    assert_eq!(
        (&problem["line"], &problem["column"]),
        (&6.into(), &11.into())
    );
    assert_eq!(problem["path"], "spec.engine");
    let said = daemon.verb(&["get"]);
    assert_eq!(said.code, Some(0));
    assert!(said.stderr.contains("broken.yaml:6:11"), "{said}");

    let said = daemon.verb(&["validate", daemon.folder().to_str().expect("a text")]);
    assert_eq!(said.code, Some(1), "{said}");
    assert!(said.stderr.contains("broken.yaml:6:11"), "{said}");
    assert!(said.stderr.contains("6 |   engine: ecko"), "{said}");
    let caret = said.stderr.lines().find(|line| line.contains('^'));
    let caret = caret.unwrap_or_else(|| panic!("no caret in {said}"));
    assert!(caret.contains("^^^^"), "{caret}");
    assert!(said.stderr.contains("did you mean `echo`?"), "{said}");
}

#[test]
fn a_running_deployment_whose_file_turns_broken_goes_on_also_across_a_restart() {
    let arguments = ["--removal-grace", "0"];
    let mut daemon = Daemon::start(&arguments);
    let port = free_port();
    let good = echo("a", port, "");
    daemon.put("a.yaml", &good);
    let before = daemon.ready_launch("a");
    for text in [broken("a"), "{".to_owned(), String::from("\u{0}")] {
        daemon.put("a.yaml", &text);
        daemon.settle();
        daemon.assert_untouched("a-0", &before);
        assert_eq!(get(port, "/health").expect("an answer").status, 200);
    }
    daemon.put("a.yaml", &broken("a"));
    daemon.settle();
    let seen = daemon.get();
    let a = item(&seen, "a").expect("it runs");
    assert_eq!(a["status"]["state"], "ready");
    let problem = &a["status"]["problems"][0];
    assert_eq!(
        (&problem["line"], &problem["column"]),
        (&6.into(), &11.into())
    );
    let shown = daemon.verb(&["describe", "a"]).done();
    assert!(shown.contains("a.yaml:6:11"), "{shown}");
    assert!(shown.contains("6 |   engine: ecko"), "{shown}");
    assert!(shown.contains("^^^^"), "{shown}");

    daemon.kill();
    daemon.run(&arguments);
    daemon.wait_for_event("a-0", "Adopted");
    daemon.settle();
    daemon.assert_untouched("a-0", &before);

    // It is even launched again as it was accepted, should it end.
    nix::sys::signal::kill(pid_of(&before), nix::sys::signal::SIGKILL).expect("it runs");
    let after = daemon.relaunched("a-0", &before);
    daemon.ready("a");

    daemon.put("a.yaml", &good);
    daemon.settle();
    daemon.assert_untouched("a-0", &after);
    let seen = daemon.get();
    let a = item(&seen, "a").expect("it runs");
    assert_eq!(a["status"]["problems"], serde_json::json!([]));
    assert!(is_alive(pid_of(&after)));
}

#[test]
fn a_folder_that_is_away_stops_nothing_and_launches_nothing() {
    let mut daemon = Daemon::start(&["--removal-grace", "0", "--resync", "0.5"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");
    let (folder, away) = (daemon.folder(), daemon.path("away"));
    fs::rename(&folder, &away).expect("a rename");
    daemon.wait_for_event("-", "DesiredUnavailable");
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(a["state"], "ready");
    daemon.assert_untouched("a-0", &before);
    let said = daemon.verb(&["diff", folder.to_str().expect("a text")]);
    assert_eq!(said.code, Some(2), "{said}");

    // Also when its controller ends meanwhile.
    daemon.stop();
    daemon.assert_untouched("a-0", &before);
    fs::rename(&away, &folder).expect("a rename");
    daemon.run(&["--removal-grace", "0", "--resync", "0.5"]);
    daemon.settle();
    daemon.assert_untouched("a-0", &before);

    // Away, back, and changes are seen again.
    fs::rename(&folder, &away).expect("a rename");
    daemon.eventually("it is told once more", || {
        (count(&daemon, "DesiredUnavailable") == 2).then_some(())
    });
    fs::rename(&away, &folder).expect("a rename");
    daemon.wait_for_event("-", "DesiredAvailable");
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
}

/// How often something general was told.
fn count(daemon: &Daemon, reason: &str) -> usize {
    let events = daemon.events();
    let counts = events
        .iter()
        .filter(|event| event["reason"] == reason)
        .filter_map(|event| event["count"].as_u64());
    usize::try_from(counts.sum::<u64>()).expect("few")
}

#[test]
fn a_file_that_is_written_in_place_is_taken_when_it_is_closed() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let (port, other) = (free_port(), free_port());
    let path = daemon.folder().join("a.yaml");
    fs::write(&path, echo("a", port, "")).expect("a file");
    let before = daemon.ready_launch("a");
    fs::write(&path, echo("a", other, "")).expect("the file");
    daemon.relaunched("a-0", &before);
    assert_eq!(daemon.ready("a")[0]["port"], other);
}

#[test]
fn a_name_that_two_files_have_is_the_first_ones_and_the_other_is_reported() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let port = free_port();
    daemon.put("m.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");
    // Earlier by name, but the other one owns it.
    daemon.put("b.yaml", &echo("a", free_port(), ""));
    let told = daemon.wait_for_event("a", "DuplicateName");
    assert!(told.contains("b.yaml") && told.contains("m.yaml"), "{told}");
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    // Once its owner is gone, it is the other one's.
    daemon.remove("m.yaml");
    daemon.relaunched("a-0", &before);
}

#[test]
fn a_controller_that_starts_while_the_folder_is_away_looks_after_what_runs() {
    let mut daemon = Daemon::start(&[]);
    daemon.put("a.yaml", &echo("a", free_port(), ""));
    let before = daemon.ready_launch("a");
    daemon.kill();
    let away = daemon.folder().with_extension("away");
    std::fs::rename(daemon.folder(), &away).expect("it moves");
    daemon.run(&[]);
    daemon.wait_for_event("-", "DesiredUnavailable");
    daemon.assert_untouched("a-0", &before);
    std::fs::rename(&away, daemon.folder()).expect("it moves back");
    daemon.wait_for_event("-", "DesiredAvailable");
    daemon.assert_untouched("a-0", &before);
}
