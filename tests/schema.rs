#[test]
fn dump() {
    std::fs::write(
        "schemas/modeldeployment.v1alpha1.json",
        evenkeel::cli::schema::schema(),
    )
    .unwrap();
}
