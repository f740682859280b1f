"""A perceptron in Keras that reads scikit-learn's handwritten digits, with Hydra's configuration."""

import hydra


def perceptron(keras, model):
    """Return the compiled network that a configuration describes."""
    layers = [keras.layers.Dense(units, activation="relu") for units in model.units]
    network = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    network.compile(
        optimizer=keras.optimizers.Adam(model.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(config):
    """Train to the last epoch, or until hetctl says stop."""
    # Imported here, so that Hydra reports mistakes in the command before the slow import of Keras.
    import keras
    from sklearn.datasets import load_digits

    from hetctl.adapters.keras import HetctlKerasCallback

    keras.utils.set_random_seed(config.seed)
    digits = load_digits()
    x, y = digits.data / 16.0, digits.target
    adapter = HetctlKerasCallback(samples=1437)
    perceptron(keras, config.model).fit(
        x[:1437],
        y[:1437],
        batch_size=config.batch_size,
        initial_epoch=adapter.initial_epoch,
        epochs=config.epochs,
        validation_data=(x[1437:], y[1437:]),
        callbacks=[adapter],
        verbose=0,
    )


if __name__ == "__main__":
    main()
