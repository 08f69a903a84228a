use tidewatch_kit::trace::Exporter;

use super::*;

#[tokio::test]
async fn each_event_starts_its_own_trace() {
    assert_eq!(trace(0), None, "no trace without an exporter");
    let _exporter = Exporter::start("test", "http://127.0.0.1:1").unwrap();
    let one = trace(0).unwrap();
    let other = trace(i64::MIN).unwrap();
    for traceparent in [&one, &other] {
        assert!(traceparent.starts_with("00-") && traceparent.ends_with("-01"), "{traceparent}");
        assert_eq!(traceparent.len(), 55);
    }
    assert_ne!(one[3..35], other[3..35]);
}
