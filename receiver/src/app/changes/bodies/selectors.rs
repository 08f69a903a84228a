//! Selectors of the objects whose bodies are read.

/// Characters of the values in one selector: a URL of 8 KiB, which proxies accept, has room for 7,000 bytes of them.
const MAX_SELECTOR: usize = 4_000;

/// Selectors that select together all objects whose label has one of these values.
pub(super) fn by_label<'a>(label: &str, values: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut selectors: Vec<String> = Vec::new();
    for value in values {
        match selectors.last_mut().filter(|values| values.len() + value.len() < MAX_SELECTOR) {
            Some(values) => {
                values.push(',');
                values.push_str(value);
            }
            None => selectors.push(value.to_owned()),
        }
    }
    selectors.into_iter().map(|values| format!("{label} in ({values})")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tidewatch_api::names::label;

    use super::*;

    #[test]
    fn selectors_name_each_kyma_once_and_fit_into_a_url() {
        let names: BTreeSet<_> = (0..1_000).map(|n| format!("f1c2d3e4-0000-4000-8000-{n:012}")).collect();
        let selectors = by_label(label::KYMA_NAME, names.iter().map(String::as_str));
        let prefix = format!("{} in (", label::KYMA_NAME);
        let lists = selectors.iter().map(|selector| {
            assert!(selector.len() < MAX_SELECTOR + 100, "{}", selector.len());
            selector.strip_prefix(&prefix).unwrap().strip_suffix(')').unwrap()
        });
        let selected: Vec<_> = lists.flat_map(|names| names.split(',').map(str::to_owned)).collect();
        assert_eq!(selected, names.into_iter().collect::<Vec<_>>());
        assert!((9..=11).contains(&selectors.len()), "{}", selectors.len());
        assert_eq!(by_label(label::KYMA_NAME, std::iter::empty()), [""; 0]);
    }
}
