use super::*;

fn point(samples: f64) -> Point {
    Point { samples, figures: Value::Null }
}

#[test]
fn long_curves_are_thinned_out_to_their_end() {
    for length in [0, 1, POINTS, POINTS + 1, 10 * POINTS + 7] {
        let mut points: Vec<Point> = (0..length).map(|samples| point(samples as f64)).collect();
        thin_out(&mut points);
        assert!(
            points.len() <= POINTS && points.len() >= length.min(POINTS / 2),
            "{length}: {}",
            points.len()
        );
        assert_eq!(points.last().map(|point| point.samples), length.checked_sub(1).map(|last| last as f64));
    }
}
