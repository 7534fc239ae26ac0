//! The controller dies, and another one takes over.

use nix::sys::signal::{Signal, kill};

use crate::support::daemon::{Daemon, echo, pid_of};
use crate::support::http::get;
use crate::support::process::{free_port, is_alive};

#[test]
fn engines_go_on_without_their_controller_and_the_next_one_adopts_them_and_notices_their_end() {
    let mut daemon = Daemon::start(&["--resync", "600"]);
    let (port, loading_port) = (free_port(), free_port());
    daemon.put("a.yaml", &echo("a", port, ""));
    daemon.put(
        "loading.yaml",
        &echo("loading", loading_port, "args: [--load-seconds, '1.5']"),
    );
    let before = daemon.ready_launch("a");
    daemon.in_state("loading", "starting");
    let loading = daemon.launch("loading-0");
    daemon.kill();

    assert_eq!(get(port, "/health").expect("an answer").status, 200);
    let seen = daemon.get();
    assert_eq!(seen["reconciled"], false);
    let said = daemon.verb(&["get", "a"]);
    assert_eq!(said.code, Some(0), "{said}");
    assert!(said.stdout.contains("ready"), "{said}");
    assert!(said.stderr.contains("nobody is reconciling"), "{said}");

    daemon.run(&["--resync", "600"]);
    let told = daemon.wait_for_event("a-0", "Adopted");
    assert!(told.contains(&pid_of(&before).to_string()), "{told}");
    daemon.ready("loading");
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    daemon.assert_untouched("loading-0", &loading);
    assert_eq!(daemon.get()["reconciled"], true);

    // It is no child of the new controller, and its end is noticed all the same.
    kill(pid_of(&before), Signal::SIGKILL).expect("it runs");
    let after = daemon.relaunched("a-0", &before);
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.restarts, 1);
    assert_eq!(after.lease, before.lease);
    daemon.ready("a");
    daemon.assert_untouched("loading-0", &loading);
}

#[test]
fn an_engine_that_dies_while_no_controller_runs_is_launched_by_the_next_one() {
    let mut daemon = Daemon::start(&[]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    daemon.put("b.yaml", &echo("b", free_port(), ""));
    let (a, b) = (daemon.ready_launch("a"), daemon.ready_launch("b"));
    daemon.kill();
    kill(pid_of(&a), Signal::SIGKILL).expect("it runs");
    let pid = pid_of(&a);
    daemon.eventually("it is gone", || (!is_alive(pid)).then_some(()));
    let table = daemon.verb(&["get", "a"]).done();
    assert!(table.contains("exited"), "{table}");

    daemon.run(&[]);
    daemon.relaunched("a-0", &a);
    daemon.ready("a");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.restarts, 1);
    daemon.assert_untouched("b-0", &b);
}

#[test]
fn what_was_edited_and_removed_while_no_controller_ran_is_caught_up_with() {
    let mut daemon = Daemon::start(&["--removal-grace", "0.2"]);
    let ports = [free_port(), free_port(), free_port()];
    for (name, port) in ["kept", "edited", "removed"].into_iter().zip(ports) {
        daemon.put(&format!("{name}.yaml"), &echo(name, port, ""));
    }
    let kept = daemon.ready_launch("kept");
    let edited = daemon.ready_launch("edited");
    let removed = daemon.ready_launch("removed");
    daemon.kill();
    daemon.put(
        "edited.yaml",
        &echo("edited", ports[1], "options: {maxContextLength: 1024}"),
    );
    daemon.remove("removed.yaml");
    daemon.rename("kept.yaml", "renamed.yaml");

    daemon.run(&["--removal-grace", "0.2"]);
    daemon.relaunched("edited-0", &edited);
    daemon.wait_until_forgotten("removed-0");
    assert!(!is_alive(pid_of(&removed)));
    daemon.ready("edited");
    daemon.assert_untouched("kept-0", &kept);
}

#[test]
fn a_controller_that_is_killed_again_and_again_leaves_one_engine() {
    let mut daemon = Daemon::start(&[]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    for _ in 0..8 {
        // Wherever in the launch it is by now.
        daemon.kill();
        daemon.run(&[]);
    }
    daemon.ready("a");
    let launch = daemon.launch("a-0");
    daemon.settle();
    daemon.assert_untouched("a-0", &launch);
    let processes = daemon.processes();
    assert_eq!(processes.len(), 1, "{processes:?}");
    assert_eq!(processes[0].pid, pid_of(&launch));
}

#[test]
fn an_engine_whose_record_cannot_be_read_is_not_launched_beside_itself() {
    let mut daemon = Daemon::start(&[]);
    daemon.put("a.yaml", &echo("a", free_port(), ""));
    let before = daemon.ready_launch("a");
    daemon.kill();
    std::fs::write(daemon.state().join("instances/a-0.json"), "").expect("a record that was torn");
    daemon.run(&["--resync", "0.2"]);
    daemon.wait_for_event("a-0", "RecordQuarantined");
    daemon.settle();
    assert_eq!(daemon.processes().len(), 1, "{}", daemon.story());
    assert!(is_alive(pid_of(&before)));

    daemon.stop();
    let said = daemon.verb(&["down"]);
    assert_eq!(said.code, Some(1), "{said}");
    assert!(said.stderr.contains("quarantine/a-0.json"), "{said}");

    daemon.run(&["--resync", "0.2"]);
    nix::sys::signal::kill(pid_of(&before), nix::sys::signal::Signal::SIGKILL).expect("it runs");
    std::fs::remove_file(daemon.state().join("quarantine/a-0.json")).expect("it is there");
    daemon.ready("a");
}
