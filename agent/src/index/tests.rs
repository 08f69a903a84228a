use std::num::NonZeroI64;

use proptest::prelude::*;

use super::*;

fn seen(version: u64, generation: i64, metadata: u64) -> ObjectState {
    ObjectState {
        uid: "u".into(),
        version: Version::Number(version),
        generation: NonZeroI64::new(generation),
        metadata,
    }
}

fn index(field: Field, every_version: bool) -> Index {
    let hasher = Arc::new(ObjectHasher::new(&"r-1".parse().unwrap()));
    Index::new(hasher, ChangeRule { field, every_version }, 100)
}

fn listed(mut index: Index, objects: &[(&str, ObjectState)]) -> Index {
    index.begin_list();
    for (key, seen) in objects {
        index.apply(key, seen.clone());
    }
    index.finish_list();
    index
}

fn change(applied: &Applied) -> Option<Change> {
    match applied {
        Applied::Changed(moved) => Some(moved.change),
        Applied::Unchanged => None,
        Applied::Coarse => panic!("not coarse"),
    }
}

#[test]
fn changes_are_classified_from_metadata_alone() {
    use Change::{Created, Metadata, Spec, Status};
    let table = [
        // before, after, change reported by a spec watch, change reported by a status watch
        (seen(1, 1, 1), seen(1, 1, 1), None, None),
        (seen(1, 1, 1), seen(2, 2, 1), Some(Spec), Some(Spec)),
        (seen(1, 1, 1), seen(2, 2, 2), Some(Spec), Some(Spec)),
        (seen(5, 5, 1), seen(2, 4, 1), Some(Spec), Some(Spec)),
        (seen(1, 1, 1), seen(2, 1, 2), Some(Metadata), Some(Metadata)),
        (seen(1, 1, 1), seen(2, 1, 1), None, Some(Status)),
        // Kinds without a generation, such as ConfigMaps.
        (seen(1, 0, 1), seen(2, 0, 1), Some(Spec), Some(Spec)),
        (seen(1, 0, 1), seen(2, 0, 2), Some(Metadata), Some(Metadata)),
        (seen(1, 1, 1), ObjectState { uid: "v".into(), ..seen(2, 1, 1) }, Some(Created), Some(Created)),
    ];
    for (before, after, spec, status) in table {
        for (field, expected) in [(Field::Spec, spec), (Field::Status, status)] {
            let mut index = listed(index(field, false), &[("ns/a", before.clone())]);
            assert_eq!(change(&index.apply("ns/a", after.clone())), expected, "{field:?} {before:?} {after:?}");
        }
    }
}

#[test]
fn without_a_status_subresource_every_version_counts() {
    let mut index = listed(index(Field::Spec, true), &[("ns/a", seen(1, 1, 1))]);
    let digest = index.digest();
    assert_eq!(change(&index.apply("ns/a", seen(2, 1, 1))), Some(Change::Spec));
    assert_ne!(index.digest(), digest);
}

#[test]
fn relist_counts_versions_and_finds_deleted_objects() {
    let objects = [("ns/a", seen(1, 1, 1)), ("ns/b", seen(2, 1, 1)), ("ns/c", seen(3, 1, 1))];
    let mut index = listed(index(Field::Spec, false), &objects);
    index.begin_list();
    assert!(index.is_complete());
    assert_eq!(change(&index.apply("ns/a", seen(9, 1, 1))), Some(Change::Status));
    assert_eq!(change(&index.apply("ns/b", seen(2, 1, 1))), None);
    // The objects that an aborted list did not reach are not removed.
    index.begin_list();
    index.apply("ns/a", seen(9, 1, 1));
    index.apply("ns/b", seen(2, 1, 1));
    let gone = index.finish_list();
    assert_eq!(gone.iter().map(|gone| &*gone.key).collect::<Vec<_>>(), ["ns/c"]);
    assert_eq!(index.len(), 2);
}

#[test]
fn digest_requires_a_complete_list() {
    let mut index = index(Field::Spec, false);
    assert_eq!(index.digest(), None);
    index.begin_list();
    index.apply("ns/a", seen(1, 1, 1));
    assert_eq!(index.digest(), None);
    index.finish_list();
    assert!(index.digest().is_some());
}

#[test]
fn spec_digest_ignores_status_changes() {
    let mut spec = listed(index(Field::Spec, false), &[("ns/a", seen(1, 1, 1))]);
    let mut status = listed(index(Field::Status, false), &[("ns/a", seen(1, 1, 1))]);
    let before = (spec.digest(), status.digest());
    spec.apply("ns/a", seen(2, 1, 1));
    status.apply("ns/a", seen(2, 1, 1));
    assert_eq!(spec.digest(), before.0);
    assert_ne!(status.digest(), before.1);
}

#[test]
fn index_above_the_cap_is_coarse() {
    let mut index = index(Field::Spec, false);
    index.begin_list();
    let last = (0..=100).map(|n| index.apply(&format!("ns/{n}"), seen(1, 1, 1))).last();
    assert_eq!(last, Some(Applied::Coarse));
    assert!(index.finish_list().is_empty());
    assert_eq!((index.len(), index.digest()), (0, None));
    assert_eq!(index.delete("ns/1"), Applied::Coarse);
    // The next list has fewer objects, so the index is exact again.
    index.begin_list();
    index.apply("ns/1", seen(1, 1, 1));
    index.finish_list();
    assert!(!index.is_coarse() && index.is_complete());
}

proptest! {
    #[test]
    fn digest_matches_the_set_and_changes_by_the_reported_deltas(
        steps in prop::collection::vec((0u8..6, 0u64..4, 1i64..3, 0u64..3, any::<bool>()), 0..60)
    ) {
        let mut index = listed(index(Field::Status, false), &[]);
        let mut sum = index.digest().unwrap();
        for (name, version, generation, metadata, delete) in steps {
            let key = format!("ns/{name}");
            let applied =
                if delete { index.delete(&key) } else { index.apply(&key, seen(version, generation, metadata)) };
            if let Applied::Changed(moved) = applied {
                sum += moved.after - moved.before;
            }
        }
        prop_assert_eq!(index.digest(), Some(sum));
        let parts = index.after("", None).fold(Digest::ZERO, |sum, (_, _, part)| sum + part);
        prop_assert_eq!(parts, sum);
    }
}
